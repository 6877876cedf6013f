"""Pinned memory in whole allocations, and what a card is to round."""

import pytest
import torch
from torch import Tensor

from quire.execution.cuda.cuda_memory import PinnedMemory, empty_host_cache, pinned_bytes, use_exact_products


def rounded(allocations: list[int]) -> int:
    """Return what PyTorch takes for pinned allocations of these sizes."""
    return sum(1 << (size - 1).bit_length() for size in allocations)


@pytest.mark.parametrize("num_bytes", [64, 73, 1000, 4096, 4097])
@pytest.mark.parametrize("num_tensors", [1, 2, 56, 64])
def test_pinned_tensors_share_allocations_that_are_full(
    num_tensors: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated, zeros = list[int](), torch.zeros

    def unpinned(size: int, *, pin_memory: bool, dtype: torch.dtype) -> Tensor:
        assert pin_memory
        allocated.append(size)
        return zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", unpinned)
    memory = PinnedMemory([num_bytes] * num_tensors)
    tensors = [memory.allocate(num_bytes) for _ in range(num_tensors)]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert [tensor.tolist() for tensor in tensors] == [[index] * num_bytes for index in range(num_tensors)]
    assert rounded(allocated) == pinned_bytes([num_bytes] * num_tensors)
    assert rounded(allocated) <= rounded([num_bytes + -num_bytes % 64] * num_tensors)


def test_pinned_tensors_of_two_models_share_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, zeros = list[int](), torch.zeros

    def unpinned(size: int, *, pin_memory: bool, dtype: torch.dtype) -> Tensor:
        assert pin_memory
        allocated.append(size)
        return zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", unpinned)
    sizes = [*[73] * 5, *[9000] * 3] * 2
    memory = PinnedMemory(sizes)
    tensors = [memory.allocate(num_bytes) for num_bytes in sizes]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert [tensor.tolist() for tensor in tensors] == [[index] * size for index, size in enumerate(sizes)]
    assert rounded(allocated) == pinned_bytes(sizes)
    assert rounded(allocated) < rounded([size + -size % 64 for size in sizes])


def test_swap_space_of_28_layers_takes_little_more_than_its_size() -> None:
    assert pinned_bytes([73 << 20] * 56) < 1.05 * 56 * (73 << 20)


@pytest.mark.parametrize("has_new_name", [True, False], ids=["torch 2.12", "torch 2.11"])
def test_pinned_memory_is_given_back_by_the_name_that_torch_has(
    has_new_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[str]()
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: called.append("old"), raising=False)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: called.append("new"), raising=False)
    if not has_new_name:
        monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    empty_host_cache()
    assert called == ["new" if has_new_name else "old"]


def test_products_are_exact_whatever_was_set_before() -> None:
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    flags = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    torch.set_float32_matmul_precision("high")
    try:
        use_exact_products()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not matmul.allow_tf32
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision(before)
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = flags
