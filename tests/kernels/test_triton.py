"""The CUDA back end on a machine without a GPU: interpreted, and compiled for cards that are not here."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.core.config import QUANTIZED
from quire.kernels.layers import Activation
from quire.kernels.linear_weight import LinearWeight
from support.paged_cache import plain_spec, rotary_spec
from support.triton_compiler import compiled_launches, specialized_launches

pytest.importorskip("triton", reason="Triton is not installed")
dense = LinearWeight.dense
FOLDER = Path(__file__).parent / "triton"


@pytest.mark.timeout(1800)  # the interpreter takes a minute of a processor
@pytest.mark.parametrize("marks", ["not matrix", pytest.param("matrix", marks=pytest.mark.matrix)])
def test_kernels_match_their_references_in_the_interpreter(marks: str) -> None:
    """Triton chooses its interpreter when it is imported, so it has a process to itself."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", marks, str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout, result.stdout


@pytest.mark.matrix
def test_benchmark_runs_without_a_card() -> None:
    command = [sys.executable, str(FOLDER.parents[2] / "bench/gpu.py"), "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| tiny | 2 |") == 2, "by Quire, and by transformers"


@pytest.mark.matrix
def test_benchmark_of_the_host_runs() -> None:
    command = [sys.executable, str(FOLDER.parents[2] / "bench/gpu_host.py"), "--steps", "12"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" steps") == 6, result.stdout


def on_one_of(*capabilities: int) -> pytest.MarkDecorator:
    """Parametrize with the first of some capabilities, and for `make matrix` with the others."""
    first, *others = capabilities
    return pytest.mark.parametrize("capability", [first, *(pytest.param(x, marks=pytest.mark.matrix) for x in others)])


CASES = [((32, 8, 128), torch.bfloat16)]
OTHERS = [
    ((16, 4, 64), torch.bfloat16), ((8, 2, 32), torch.float16), ((32, 32, 80), torch.float16),
    ((8, 4, 256), torch.bfloat16), ((8, 2, 32), torch.float32), ((32, 8, 128), torch.float32),
    ((8, 1, 128), torch.bfloat16), ((28, 4, 128), torch.bfloat16),
]  # fmt: skip
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}  # a program's most


@on_one_of(90, 80, 86, 89, 100, 103, 120)
@pytest.mark.parametrize(
    ("heads", "dtype"), [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in OTHERS)], ids=str
)
def test_kernels_of_a_layer_compile_without_spilling(
    heads: tuple[int, int, int], dtype: torch.dtype, capability: int
) -> None:
    from quire.kernels.choice import cuda_back_end
    from quire.kernels.paged_attention import build_metadata
    from quire.kernels.triton import triton_attention

    ops, (num_heads, num_kv_heads, head_dim) = cuda_back_end(), heads
    cache = torch.empty(3, 16, num_kv_heads, head_dim, dtype=dtype)
    query, key = torch.empty(70, num_heads, head_dim, dtype=dtype), torch.empty(70, num_kv_heads, head_dim, dtype=dtype)
    int32, int64 = torch.zeros(5, dtype=torch.int32), torch.zeros(70, dtype=torch.int64)
    with compiled_launches(capability) as kernels:
        metadata = build_metadata(torch.zeros(4, 2048, dtype=torch.int32), int32, int32[:4], 16)
        spec = plain_spec(query, num_kv_heads)
        ops.paged_attention(spec, query, cache, cache, metadata)
        if capability in (80, 90):
            triton_attention.paged_attention(spec, query, cache, cache, metadata, is_exact=True)
        ops.write_kv(rotary_spec(query, key, torch.empty(9, head_dim)), query, key, key, int64, cache, cache, int64)
        ops.norm(torch.empty(4096, dtype=dtype), None, 1e-5, False)(torch.empty(4, 4096, dtype=dtype), None)
    assert {kernel.name for kernel in kernels} >= {"_attend_kernel", "_plan_kernel", "_combine_kernel"}
    waiting = [kernel for kernel in kernels if kernel.name != "_plan_kernel"]  # what is before a plan may be a copy
    assert all(kernel.overlaps == (capability >= 90) for kernel in waiting), kernels
    assert sum(kernel.name == "_attend_kernel" for kernel in kernels) == (3 if capability in (80, 90) else 2)
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels
    assert all(kernel.reads_widely for kernel in kernels if kernel.name == "_attend_kernel"), kernels
    assert all(kernel.shared_bytes <= SHARED_KIB[capability] * 1024 for kernel in kernels), kernels


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_cards_of_a_family_have_the_same_tiles(head_dim: int, is_exact: bool) -> None:
    from quire.kernels.triton.triton_attention import chunk_options

    b200, b300, rtx = (chunk_options(head_dim, torch.bfloat16, each, is_exact=is_exact) for each in (100, 103, 120))
    assert b200 == b300
    assert head_dim not in (80, 128) or b200 != rtx


@on_one_of(80, 90)
@pytest.mark.parametrize(
    "kv", ["int8_per_token_head", *(pytest.param(kv, marks=pytest.mark.matrix) for kv in ("fp8_per_token_head", "fp8"))]
)
def test_kernels_of_a_cache_of_8_bits_compile_without_spilling(kv: str, capability: int) -> None:
    from quire.kernels.choice import cuda_back_end
    from quire.kernels.paged_attention import build_metadata
    from quire.kernels.triton import triton_attention

    ops, stored = cuda_back_end(), QUANTIZED[kv]
    cache = torch.empty(3, 16, 8, 128 + stored.scale_bytes, dtype=torch.int8).view(getattr(torch, stored.element))
    query, key = torch.empty(70, 32, 128, dtype=torch.bfloat16), torch.empty(70, 8, 128, dtype=torch.bfloat16)
    int32, int64 = torch.zeros(5, dtype=torch.int32), torch.zeros(70, dtype=torch.int64)
    with compiled_launches(capability) as kernels:
        metadata = build_metadata(torch.zeros(4, 2048, dtype=torch.int32), int32, int32[:4], 16)
        for is_exact in (False, True):
            triton_attention.paged_attention(plain_spec(query, 8), query, cache, cache, metadata, is_exact=is_exact)
        ops.write_kv(rotary_spec(query, key, torch.empty(9, 128)), query, key, key, int64, cache, cache, int64)
    assert sum(kernel.name == "_attend_kernel" for kernel in kernels) == 3
    assert any(kernel.name == "_write_quantized_kernel" for kernel in kernels)
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels
    assert all(kernel.reads_widely for kernel in kernels if kernel.name == "_attend_kernel"), kernels
    assert all(kernel.shared_bytes <= SHARED_KIB[capability] * 1024 for kernel in kernels), kernels


@on_one_of(90, 80)
def test_softcap_sinks_window_and_interleaved_rotary_compile_without_spilling(capability: int) -> None:
    from quire.kernels.choice import cuda_back_end
    from quire.kernels.paged_attention import build_metadata

    ops, cache = cuda_back_end(), torch.empty(3, 16, 8, 128, dtype=torch.bfloat16)
    query, key = torch.empty(70, 32, 128, dtype=torch.bfloat16), torch.empty(70, 8, 128, dtype=torch.bfloat16)
    int32, int64 = torch.zeros(5, dtype=torch.int32), torch.zeros(70, dtype=torch.int64)
    with compiled_launches(capability) as kernels:
        metadata = build_metadata(torch.zeros(4, 2048, dtype=torch.int32), int32, int32[:4], 16)
        spec = plain_spec(query, 8, window=4096, softcap=50.0, sinks=torch.empty(32))
        ops.paged_attention(spec, query, cache, cache, metadata)
        rotary = rotary_spec(query, key, torch.empty(9, 64), is_interleaved=True)
        ops.write_kv(rotary, query, key, key, int64, cache, cache, int64)
    assert {kernel.name for kernel in kernels} == {"_attend_kernel", "_plan_kernel", "_combine_kernel", "_write_kernel"}
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels


@on_one_of(80, 90)
def test_other_kernels_compile_without_spilling(capability: int) -> None:
    import numpy as np

    from quire.kernels.choice import cuda_back_end
    from quire.kernels.sampling import SETTINGS

    ops, half = cuda_back_end(), torch.empty(64, 4096, dtype=torch.bfloat16)
    blocks, ids = [torch.empty(4, 16, 8, 128, dtype=torch.bfloat16)], torch.tensor([1])
    with compiled_launches(capability) as kernels:
        ops.norm(half[0], half[0], 1e-5, True)(half, half.clone())
        ops.linear(dense(half), activation="silu_and_mul")(half)
        ops.linear(dense(half), activation="gelu")(half)
        ops.copy_blocks(blocks, blocks, ids.numpy(), ids.numpy() + 1)
        ops.sampling.choose_tokens(torch.empty(4, 128_256), np.ones(4, SETTINGS))
    assert len(kernels) == 9
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels
    assert all(kernel.reads_widely for kernel in kernels), kernels


PRODUCTS = [("dense", "", 0), ("int8", "constant", 128), ("int4", "zeros", 0)]
OTHER_PRODUCTS = [
    ("int8", "zeros", 32), ("int8", "constant", 0), ("int4", "zeros", 128), ("int4", "minimums", 32), ("fp8", "", 0),
    ("codebook4", "", 0),
]  # fmt: skip


@on_one_of(90, 80)
@pytest.mark.parametrize(
    ("weight_format", "kind", "activation_group_size"),
    [*PRODUCTS, *(pytest.param(*case, marks=pytest.mark.matrix) for case in OTHER_PRODUCTS)],
)
def test_products_compile_without_spilling(
    weight_format: str, kind: str, activation_group_size: int, capability: int
) -> None:
    from kernels.test_quantized import random_weight
    from quire.kernels.triton.triton_linear import CudaLinear

    half, fields = torch.bfloat16, {"activation_group_size": activation_group_size}
    weight = dense(torch.empty(256, 512, dtype=half))
    if weight_format != "dense":
        group_size = activation_group_size or 128
        weight = random_weight((256, 512), group_size, weight_format, kind, dtype=half, **fields)
    with compiled_launches(capability) as kernels:
        for num_rows in (1, 64):
            for activation in ("none", "silu_and_mul"):
                layer = CudaLinear(weight, activation=activation, is_exact=weight_format == "dense")
                layer(torch.empty(num_rows, 512, dtype=half))
    products = [kernel for kernel in kernels if kernel.name == "_product_kernel"]
    assert len(products) >= 3
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels
    assert all(kernel.reads_widely for kernel in products) or activation_group_size == 32, products
    assert all(kernel.shared_bytes <= SHARED_KIB[capability] << 10 for kernel in products), products


@on_one_of(90, 80, 86, 100, 103, 120)
@pytest.mark.parametrize("activation", ["silu_and_mul", pytest.param("none", marks=pytest.mark.matrix)])
def test_tiles_of_exact_products_compile_to_one_instruction_without_spilling(
    activation: Activation, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton import products
    from quire.kernels.triton.triton_linear import CudaLinear

    half, tiles = torch.bfloat16, products.exact_tiles(capability, is_gated=activation != "none")
    layer = CudaLinear(dense(torch.empty(1024, 512, dtype=half)), activation=activation, is_exact=True)
    with compiled_launches(capability) as kernels:
        for tile in tiles:
            monkeypatch.setattr(products, "exact_tile", lambda *_, tile=tile, **__: tile)
            layer(torch.empty(64, 512, dtype=half))
    assert len(kernels) == len(tiles)
    assert len({kernel.products for kernel in kernels}) == 1, "bits are those of an instruction"
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels
    assert all(kernel.reads_widely for kernel in kernels), kernels
    assert all(kernel.shared_bytes <= SHARED_KIB[capability] << 10 for kernel in kernels), kernels


@on_one_of(80, 90)
@pytest.mark.parametrize(
    ("weight_format", "kind"),
    [("dense", ""), pytest.param("int4", "zeros", marks=pytest.mark.matrix)],
)
def test_experts_compile_without_spilling(weight_format: str, kind: str, capability: int) -> None:
    from kernels.test_quantized import random_weight
    from quire.kernels.layers import Expert, Routing
    from quire.kernels.triton.triton_experts import TritonExperts
    from quire.kernels.triton.triton_linear import CudaLinear

    half, is_dense = torch.bfloat16, weight_format == "dense"

    def weight(*sizes: int) -> LinearWeight:
        if is_dense:
            return dense(torch.empty(sizes, dtype=half))
        return random_weight(sizes, 128, weight_format, kind, dtype=half)

    layers_in = [CudaLinear(weight(512, 256), activation="silu_and_mul") for _ in range(5)]
    experts = [Expert(layer, CudaLinear(weight(256, 256), dtype=torch.float32)) for layer in layers_in]
    mixture = TritonExperts(CudaLinear(weight(5, 256), dtype=torch.float32), experts, Routing(2, True, has_shared=True))
    with compiled_launches(capability) as kernels:
        for num_rows in (4, 256):
            mixture(torch.empty(num_rows, 256, dtype=half))
    assert {kernel.name for kernel in kernels} >= {"_choose_kernel", "_group_kernel", "_product_kernel", "_add_kernel"}
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels
    assert all(kernel.reads_widely for kernel in kernels if kernel.name in ("_product_kernel", "_add_kernel")), kernels


@on_one_of(90, 80)
def test_adapters_compile_without_spilling(capability: int) -> None:
    from quire.kernels.low_rank import FactorSizes, RowAdapters
    from quire.kernels.triton.triton_low_rank import TritonSlots

    sizes = {"qkv": FactorSizes(1024, 512, ((0, 256), (256, 128), (384, 128)))}
    slots = TritonSlots(sizes, 2, 16, torch.bfloat16, torch.device("cpu"))
    with compiled_launches(capability) as kernels:
        for num_rows in (8, 256):
            rows = RowAdapters((), torch.zeros(num_rows, dtype=torch.int32), slots).grouped()
            rows.addend("qkv", torch.empty(num_rows, 1024, dtype=torch.bfloat16))
    assert {kernel.name for kernel in kernels} == {"_group_kernel", "_product_kernel", "_add_kernel"}
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels
    assert all(kernel.reads_widely for kernel in kernels if kernel.name == "_product_kernel"), kernels


@on_one_of(80, 90)
def test_layers_of_one_output_compile(capability: int) -> None:
    """Triton makes arguments of 1 constants."""
    from quire.kernels.triton.few_rows import few_rows_product
    from quire.kernels.triton.triton_linear import CudaLinear

    x = torch.empty(3, 64, dtype=torch.bfloat16)
    with compiled_launches(capability) as kernels:
        CudaLinear(dense(x[:1]), is_exact=True)(x)
        CudaLinear(dense(x[:2]), is_exact=True, activation="silu_and_mul")(x)
        few_rows_product(x, CudaLinear(dense(x[:2]), activation="silu_and_mul"))
    assert [kernel.name for kernel in kernels] == ["_product_kernel", "_product_kernel", "_few_rows_kernel"]


@on_one_of(90, 80, 86, 89, 100, 103, 120)
@pytest.mark.parametrize("num_rows", [4, 64, *(pytest.param(each, marks=pytest.mark.matrix) for each in (12, 24))])
def test_products_of_few_rows_compile_without_spilling(num_rows: int, capability: int) -> None:
    from quire.kernels.paged_attention import Heads, RotarySpec
    from quire.kernels.program import LayerInputs, RotaryWriteOp
    from quire.kernels.triton import card
    from quire.kernels.triton.few_rows import few_rows_product, projected_query
    from quire.kernels.triton.triton_kv_cache_write import write_kv
    from quire.kernels.triton.triton_linear import CudaLinear
    from quire.kernels.triton.triton_norm import TritonNorm

    x, slots = torch.empty(num_rows, 512, dtype=torch.bfloat16), torch.zeros(num_rows, dtype=torch.int64)
    caches, metadata = [[torch.empty(3, 16, 8, 128, dtype=torch.bfloat16)] for _ in range(2)], SimpleNamespace()
    # as many outputs as give the widest tiles
    norm, weight = TritonNorm(x[0], None, 1e-5, False), dense(torch.empty(6144, 512, dtype=torch.bfloat16))
    gates = dense(torch.empty(12288, 512, dtype=torch.bfloat16))
    with compiled_launches(capability) as kernels:
        few_rows_product(x, CudaLinear(weight), norm=norm)
        few_rows_product(x, CudaLinear(gates, activation="silu_and_mul"), norm=norm)
        few_rows_product(x, CudaLinear(weight), residual=torch.empty(num_rows, 6144, dtype=torch.bfloat16))
        for is_interleaved in (False, True):
            op = RotaryWriteOp("", 0, RotarySpec(Heads(32, 8, 128), torch.empty(9, 128), is_interleaved), write_kv)
            inputs = LayerInputs(slots, slots, metadata, *caches)  # type: ignore[arg-type]
            projected_query(x, CudaLinear(weight), norm, op, inputs)
        with card.without_early_launch():
            few_rows_product(x, CudaLinear(weight), norm=norm)
    is_early = [(kernel.overlaps, kernel.fetches_ahead) for kernel in kernels]
    assert is_early == [(capability >= 90,) * 2] * 5 + [(False, False)]
    assert not [kernel for kernel in kernels if kernel.spilled_bytes], kernels
    assert all(kernel.reads_widely for kernel in kernels), kernels
    assert all(kernel.shared_bytes <= SHARED_KIB[capability] << 10 for kernel in kernels), kernels


def launch_a_step(num_seqs: int, num_queries: int, num_table_blocks: int, *, is_exact: bool = False) -> None:
    """Launch what a step of so many sequences needs, with so many tokens of each."""
    import numpy as np

    from quire.kernels.choice import cuda_back_end
    from quire.kernels.paged_attention import build_metadata
    from quire.kernels.sampling import SETTINGS

    ops, num_tokens, dtype = cuda_back_end(is_exact=is_exact), num_seqs * num_queries, torch.bfloat16
    x, positions = torch.empty(num_tokens, 512, dtype=dtype), torch.zeros(num_tokens, dtype=torch.int64)
    query, key, value = torch.empty(num_tokens, 8, 64, dtype=dtype).split([4, 2, 2], dim=1)
    caches = [torch.empty(2 * num_seqs, 16, 2, 64, dtype=dtype) for _ in range(2)]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries
    tables, lens = torch.zeros(num_seqs, num_table_blocks, dtype=torch.int32), starts[1:].clone()
    ops.norm(x[0], None, 1e-5, False)(x, None)
    ops.norm(x[0], None, 1e-5, False)(x, x.clone())
    ops.norm(x[0, :64], None, 1e-5, False)(query)
    ops.write_kv(rotary_spec(query, key, torch.empty(9, 64)), query, key, value, positions, *caches, positions)
    ops.paged_attention(plain_spec(query, 2), query, *caches, build_metadata(tables, starts, lens, 16))
    ops.linear(dense(torch.empty(64, 512, dtype=dtype)), activation="silu_and_mul")(x)
    if is_exact:
        ops.linear(dense(torch.empty(64, 512, dtype=dtype)))(x)
        ops.head(dense(torch.empty(301, 512, dtype=dtype)))(x[num_queries - 1 :: num_queries])
    ops.copy_blocks(caches, caches, np.arange(num_seqs), np.arange(num_seqs) + num_seqs)
    ops.sampling.choose_tokens(torch.empty(num_seqs, 301), np.ones(num_seqs, SETTINGS))


@pytest.mark.parametrize(("is_exact", "num_kernels"), [(False, 12), (True, 12)])
def test_steps_of_any_size_run_on_the_same_kernels(is_exact: bool, num_kernels: int) -> None:
    """One that is compiled while others wait for their tokens takes seconds.

    And with `is_exact`, one that is specialized for other alignments may sum in another order.
    """
    with specialized_launches() as kernels:
        launch_a_step(3, 2, 40, is_exact=is_exact)
        first = kernels.copy()
        for sizes in [(1, 1, 1), (1, 2, 16), (2, 1, 17), (16, 1, 64), (16, 16, 33), (17, 3, 160), (256, 1, 16)]:
            launch_a_step(*sizes, is_exact=is_exact)
    assert len({name for name, _ in first}) == num_kernels
    assert kernels == first


def test_exact_steps_of_an_engine_run_on_the_same_kernels(tmp_path: Path) -> None:
    """With the strides and addresses that a decoder's layers give each other, whatever they are."""
    from quire.execution.cuda.cuda_graphs import dummy_batch
    from quire.kernels.choice import cuda_back_end
    from quire.model.kv_cache import KVCache
    from quire.model.loader import load_model
    from support.random_model import write_random_model

    model = load_model(write_random_model(tmp_path), dtype="bfloat16", back_end=cuda_back_end(is_exact=True))
    cache = KVCache.allocate(model.kv_geometry, 4, 16, model.back_end)
    seen = list[set[tuple[str, str]]]()
    for num_rows, num_tokens in [(3, 6), (1, 1), (1, 2), (2, 2), (16, 16), (17, 51), (64, 64)]:
        with specialized_launches() as kernels:
            hidden = model.forward(dummy_batch(num_rows, num_tokens, 4, torch.device("cpu")), cache)
            model.logits(hidden[:num_rows])
        seen.append(kernels)
    assert "_product_kernel" in {name for name, _ in seen[0]}
    assert all(kernels == seen[0] for kernels in seen)


def test_products_are_specialized_for_the_alignment_of_their_inputs() -> None:
    """So the test above would see an exact layer that some steps give aligned inputs, and others do not."""
    from quire.kernels.triton.triton_linear import CudaLinear

    wide = torch.empty(3, 529, dtype=torch.bfloat16)
    layer = CudaLinear(dense(torch.empty(64, 512, dtype=torch.bfloat16)), is_exact=True)
    with specialized_launches() as kernels:
        for x in (wide[:, :512].contiguous(), wide[:, :512], wide[:, 1:513]):
            layer(x)
    assert len(kernels) == 3
