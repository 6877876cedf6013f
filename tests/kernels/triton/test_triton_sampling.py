"""Sampling on the device against its references: the same draws give the same tokens, ties and all."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.choice import cuda_back_end
from quire.kernels.reference import sampling
from quire.kernels.reference.sampling import choose_tokens
from quire.kernels.sampling import Penalties, num_words, pack_settings
from support.draws import draws_of

OPS = pytest.importorskip("triton") and cuda_back_end().sampling
VOCAB_SIZE = 300


def tied_logits(num_rows: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Return logits of which every second row has many equal ones."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    logits[::2] = logits[::2].round()
    return logits


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [(1.0, 0.0, None, 1.0), (0.7, 0.1, None, 1.0), (1.3, 0.0, 5, 1.0), (1.0, 0.0, None, 0.6), (1.5, 0.01, 40, 0.9)],
)
def test_draws_are_those_of_the_reference(
    temperature: float, min_p: float, top_k: int | None, top_p: float, device: torch.device
) -> None:
    num_rows = 4
    logits = tied_logits(num_rows)
    log_min_p = np.float32(np.log(min_p) if min_p else -np.inf)
    draws = draws_of(
        np.full(num_rows, temperature, np.float32), np.full(num_rows, log_min_p),
        np.full(num_rows, top_k or VOCAB_SIZE, np.int32), np.full(num_rows, top_p),
        np.random.default_rng(1).random(num_rows),
    )  # fmt: skip
    expected = choose_tokens(logits, draws).tolist()
    assert OPS.choose_tokens(logits.to(device), draws).tolist() == expected
    table = torch.from_numpy(pack_settings(draws))
    assert OPS.choose_tokens(logits.to(device), table.to(device)).tolist() == expected, "settings on the device"
    assert choose_tokens(logits, table).tolist() == expected


def drawn(logits: torch.Tensor, device: torch.device, **settings: float) -> tuple[list[int], list[int]]:
    """Return the tokens drawn by the kernels, and by the reference, with the same settings in each row."""
    num_rows, vocab_size = logits.shape
    min_p, top_k = settings.get("min_p", 0.0), int(settings.get("top_k", vocab_size))
    draws = draws_of(
        np.full(num_rows, settings.get("temperature", 1.0), np.float32),
        np.full(num_rows, np.log(min_p) if min_p else -np.inf, np.float32), np.full(num_rows, top_k, np.int32),
        np.full(num_rows, settings.get("top_p", 1.0)), np.random.default_rng(1).random(num_rows),
    )  # fmt: skip
    return OPS.choose_tokens(logits.to(device), draws).tolist(), choose_tokens(logits, draws).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.0}, {"top_k": 3000, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.5, "min_p": 0.2}, {"temperature": 1e-30}, {"temperature": 1e30},
    ],
)  # fmt: skip
def test_rows_of_several_tiles_are_cut_as_by_the_reference(settings: dict[str, float], device: torch.device) -> None:
    logits = tied_logits(2, 9001)
    logits[:, 4000:4200] = -torch.inf  # as a mask leaves them
    found, expected = drawn(logits, device, **settings)
    assert found == expected


@pytest.mark.parametrize("settings", [{"top_k": 4500}, {"top_p": 0.7}, {"top_k": 6000, "top_p": 0.5}])
@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_more_tokens_near_the_cuts_than_a_program_holds(
    spread: float, settings: dict[str, float], device: torch.device
) -> None:
    logits = spread * torch.rand(1, 8500, generator=torch.Generator().manual_seed(0))
    found, expected = drawn(logits, device, **settings)
    assert found == expected


def test_allowed_tokens_may_be_fewer_than_top_k(device: torch.device) -> None:
    """A grammar forbids almost all; what weighs nothing is neither counted nor held."""
    logits = torch.full((2, 9000), -torch.inf)
    logits[:, [7, 4100, 8999]] = torch.tensor([1.0, 1.0, 0.5])
    for settings in ({"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"top_k": 2}):
        found, expected = drawn(logits, device, **settings)
        assert found == expected


@pytest.mark.parametrize(("settings", "most"), [({}, 3.0), ({"top_k": 50, "top_p": 0.9}, 5.2), ({"top_p": 0.9}, 5.2)])
def test_row_is_read_a_few_times(
    settings: dict[str, float], most: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in the interpreter: every logit that a program loads."""
    if device.type != "cpu":
        pytest.skip("only the interpreter tells what a program loads")
    from triton.runtime.interpreter import InterpreterBuilder

    logits, num_read = 2 * torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0)), 0
    begin, load = logits.data_ptr(), InterpreterBuilder.create_masked_load

    def counting(self: InterpreterBuilder, pointers: Any, mask: Any, *others: Any) -> Any:  # noqa: ANN401 (Triton's)
        nonlocal num_read
        at = pointers.data.astype(np.int64)
        num_read += int((mask.data & (at >= begin) & (at < begin + logits.nbytes)).sum())
        return load(self, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)
    found, expected = drawn(logits, device, **settings)
    assert found == expected
    assert 2 <= num_read / logits.numel() <= most


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 50, "top_p": 0.9}, {"top_k": 50}])
def test_few_tokens_are_added_to_bins_in_global_memory(
    settings: dict[str, float], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in the interpreter: one addition for a bin of a tile, and one for a token near the cuts."""
    if device.type != "cpu":
        pytest.skip("only the interpreter tells what a program adds")
    from triton.runtime.interpreter import InterpreterBuilder

    logits, num_added = 2 * torch.randn(2, 40_000, generator=torch.Generator().manual_seed(0)), 0
    add = InterpreterBuilder.create_atomic_rmw

    def counting(self: InterpreterBuilder, op: Any, pointers: Any, values: Any, mask: Any, *others: Any) -> Any:  # noqa: ANN401 (Triton's)
        nonlocal num_added
        num_added += int(mask.data.sum())
        return add(self, op, pointers, values, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counting)
    found, expected = drawn(logits, device, **settings)
    assert found == expected
    assert 0 < num_added <= 0.15 * logits.numel()


def test_rows_without_a_draw_take_the_first_of_the_highest(device: torch.device) -> None:
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(0))  # more than one tile
    logits[0, [4500, 4700]] = 9.0
    logits[1, 4321] = torch.nan
    logits[2, 17] = torch.inf
    logits[3] = -torch.inf
    logits[4, 4999] = 50.0
    temperatures = np.array([0, 1, 1, 1, 1], np.float32)
    off = np.full(5, -np.inf, np.float32), np.full(5, 5000, np.int32), np.ones(5)
    draws = draws_of(temperatures, *off, np.full(5, 0.5))
    assert OPS.choose_tokens(logits.to(device), draws).tolist() == [4500, 4321, 17, 0, 4999]
    assert OPS.choose_tokens(logits.to(device)).tolist() == [4500, 4321, 17, 0, 4999]


def test_logprobs_and_ranks_are_those_of_the_reference(device: torch.device) -> None:
    logits = tied_logits(40)
    rows, tokens, counts = np.array([3, 0, 39, 2]), np.array([1, 2, 3, 299]), np.array([5, 0, 2, 300])
    found = OPS.top_logprobs(logits.to(device), rows, tokens, counts)
    expected = sampling.top_logprobs(logits, rows, tokens, counts)
    for i, count in enumerate(counts):
        assert np.array_equal(found.token_ids[i, : count + 1], expected.token_ids[i, : count + 1])
        assert np.array_equal(found.ranks[i, : count + 1], expected.ranks[i, : count + 1])
        np.testing.assert_allclose(found.logprobs[i, : count + 1], expected.logprobs[i, : count + 1], rtol=1e-5)


def test_penalties_are_those_of_the_reference(device: torch.device) -> None:
    chooser, num = np.random.default_rng(0), 40  # more than are done at once
    logits = tied_logits(50)
    token_ids = chooser.integers(0, VOCAB_SIZE, (60, 30), dtype=np.int32)
    num_tokens = chooser.integers(2, 31, num)
    floats = [chooser.random(num).astype(np.float32) + shift for shift in (1.0, -0.5, -0.5)]
    rows = (chooser.permutation(50)[:num], token_ids, chooser.permutation(60)[:num], num_tokens, num_tokens // 2)
    on_device = logits.clone().to(device)
    OPS.penalize(on_device, Penalties(*rows, *floats))
    sampling.penalize(logits, Penalties(*rows, *floats))
    torch.testing.assert_close(on_device.cpu(), logits)


@pytest.mark.parametrize("vocab_size", [3, 96, 5000])
def test_masks_are_those_of_the_reference(vocab_size: int, device: torch.device) -> None:
    chooser = np.random.default_rng(0)
    logits = torch.randn(6, vocab_size + 5, generator=torch.Generator().manual_seed(0))
    bits = chooser.integers(0, 2**32, (4, num_words(vocab_size) + 1), dtype=np.uint32)
    bits[1], bits[2] = 0, 2**32 - 1
    rows, on_device = np.array([5, 0, 2, 3]), logits.clone().to(device)
    OPS.mask_logits(on_device[:, 2:-3], rows, bits)
    sampling.mask_logits(logits[:, 2:-3], rows, bits)
    assert torch.equal(on_device.cpu(), logits)
