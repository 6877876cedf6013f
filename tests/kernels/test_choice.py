"""The one choice of implementations."""

import dataclasses
import logging

import pytest
import torch

from quire.core.errors import ConfigError, NotInstalledError
from quire.extension.isas import usable_isas
from quire.kernels import choice
from quire.kernels.choice import choose_back_end
from quire.kernels.reference.back_ends import TORCH

CPU = torch.device("cpu")
needs_extension = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")


@needs_extension
def test_auto_is_the_extension_with_the_best_instruction_set() -> None:
    assert choose_back_end(CPU).name == "cpp"
    auto, best = choose_back_end(CPU), choose_back_end(CPU, "cpp", isa=usable_isas()[0])
    own = dataclasses.replace(auto, linear=best.linear, head=best.head)
    assert own == best, "the same, but each packs into memory of its own"


@needs_extension
@pytest.mark.parametrize("isa", usable_isas())
def test_each_usable_instruction_set_can_be_forced(isa: str) -> None:
    assert choose_back_end(CPU, isa=isa).name == "cpp"
    choose_back_end(CPU)


def test_without_the_extension_the_stand_in_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "usable_isas", lambda: ())
    with caplog.at_level(logging.WARNING):
        assert choose_back_end(CPU) is TORCH
    assert "C++ kernels were not built" in caplog.text
    with pytest.raises(ConfigError, match="cpu_isa avx512"):
        choose_back_end(CPU, isa="avx512")


@needs_extension
def test_instruction_set_that_the_cpu_lacks_is_refused_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "usable_isas", lambda: ("portable",))
    with pytest.raises(ConfigError, match="cpu_isa must be auto, portable on this CPU, got 'amx'"):
        choose_back_end(CPU, isa="amx")


@needs_extension
@pytest.mark.parametrize("head_dim", [4, 12, 584])
def test_head_sizes_that_the_extension_has_not_are_the_stand_ins(head_dim: int) -> None:
    assert choose_back_end(CPU, head_dim=head_dim) is TORCH
    with pytest.raises(ConfigError, match=f"multiple of 8 up to 576, the model's have {head_dim}"):
        choose_back_end(CPU, isa="portable", head_dim=head_dim)


def test_reference_can_be_asked_for_and_differs_where_there_is_a_faster_op() -> None:
    fast, plain = choose_back_end(CPU, "torch"), choose_back_end(CPU, "reference")
    ops = [field.name for field in dataclasses.fields(fast) if field.name != "name"]
    assert {op for op in ops if getattr(fast, op) is not getattr(plain, op)} == {"paged_attention"}


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"cpp or torch or reference, got 'triton'"):
        choose_back_end(CPU, "triton")


def test_cuda_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match=r"needs Triton: pip install 'quire\[gpu\]'"):
        choose_back_end(torch.device("cuda"))


def test_cuda_refuses_heads_that_its_attention_does_not_serve() -> None:
    pytest.importorskip("triton")
    assert choose_back_end(torch.device("cuda"), head_dim=256).name == "cuda"
    with pytest.raises(ConfigError, match="heads of at most 256, the model's have 264"):
        choose_back_end(torch.device("cuda"), head_dim=264)
