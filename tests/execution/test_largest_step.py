"""What is left for the KV cache: what the largest steps were seen to leave."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.core.errors import ConfigError
from quire.execution.largest_step import CudaMeter, bytes_left
from quire.kernels.back_end import REFERENCE
from quire.model.decoder import Decoder
from quire.model.loader import load_model
from support.random_model import write_random_model

GIB = 1 << 30


class FakeMeter(CudaMeter):
    """A card of 10 GiB on which weights take 1, the largest step 3 more, and decodes a half."""

    def __init__(self, free_bytes: int = 10 * GIB) -> None:
        self._free_bytes = free_bytes
        self._peaks = [4 * GIB, 3 * GIB // 2]

    def forget(self) -> int:
        return GIB

    def peak_bytes(self) -> int:
        return self._peaks.pop(0)

    def free_and_total_bytes(self) -> tuple[int, int]:
        return self._free_bytes, 10 * GIB


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    return load_model(write_random_model(tmp_path), back_end=REFERENCE)


def test_share_of_the_card_less_the_peak_is_left(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, torch.Size]] = []
    forward = Decoder.forward

    def counting(self: Decoder, batch: object, cache: object) -> torch.Tensor:
        steps.append((len(batch.token_ids), batch.block_tables.shape))  # type: ignore[attr-defined]
        return forward(self, batch, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", counting)
    assert bytes_left(model, 4, 90, 640, 0.9, FakeMeter()) == 9 * GIB // 2
    assert steps == [(90, torch.Size([4, 80])), (4, torch.Size([4, 80]))], "scratch memory goes by the widest table"


def test_what_draws_is_compiled_before_anybody_waits_for_it(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    choose = model.back_end.sampling.choose_tokens
    sampling = replace(
        model.back_end.sampling,
        choose_tokens=lambda logits, draws: drawn.append(len(draws.uniforms)) or choose(logits, draws),
    )
    monkeypatch.setattr(model, "back_end", replace(model.back_end, sampling=sampling))
    bytes_left(model, 4, 90, 640, 0.9, FakeMeter())
    assert drawn == [4]


def test_what_others_hold_is_not_given_away(model: Decoder) -> None:
    assert bytes_left(model, 2, 8, 64, 0.9, FakeMeter(free_bytes=GIB)) == GIB


def test_card_too_small_for_the_largest_step_is_refused(model: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization of 0.3 is 3221225472 bytes, but .* take 4831838208"):
        bytes_left(model, 2, 8, 64, 0.3, FakeMeter())
