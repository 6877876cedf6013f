"""The one choice of implementations."""

import dataclasses

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.back_end import choose_back_end

CPU = torch.device("cpu")


def test_auto_is_the_fast_one_for_the_device() -> None:
    assert choose_back_end(CPU).name == "torch"
    assert choose_back_end(CPU, "auto") is choose_back_end(CPU, "torch")


def test_reference_can_be_asked_for_and_differs_where_there_is_a_faster_op() -> None:
    fast, plain = choose_back_end(CPU), choose_back_end(CPU, "reference")
    ops = [field.name for field in dataclasses.fields(fast) if field.name != "name"]
    assert {op for op in ops if getattr(fast, op) is not getattr(plain, op)} == {
        "linear",
        "paged_attention",
        "write_kv",
        "copy_blocks",
    }


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"torch or reference, got 'triton'"):
        choose_back_end(CPU, "triton")


def test_device_that_has_no_back_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda is not supported yet"):
        choose_back_end(torch.device("cuda"))
