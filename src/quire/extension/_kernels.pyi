"""The C++ extension (csrc/module.cpp): takes addresses of checked tensors, shapes and strides in elements."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

WEIGHT_FORMATS: dict[str, int]
KV_FORMATS: dict[str, int]
BLOCK_TYPES: dict[str, int]  # by ggml's names
VALUE_TYPES: dict[str, int]  # keyed by `quire.core.arrays.dtype_name`

def usable_isas() -> list[str]: ...
def use_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def address(array: NDArray[Any]) -> int: ...
def packed_size_bf16(out_features: int, in_features: int) -> int: ...
def packed_size_float(out_features: int, in_features: int) -> int: ...
def quantized_size(weight_format: int, quantization: Quantization, out_features: int, in_features: int) -> int: ...
def pack_quantized(
    weight_format: int,
    quantization: Quantization,
    elements: int,
    stride: int,
    out_features: int,
    in_features: int,
    scales: int,
    offsets: int,
    scale_stride: int,
    scale_group_size: int,
    packed: int,
    every: int,
) -> None: ...
def expanded_size(weight_format: int, quantization: Quantization, out_features: int, in_features: int) -> int: ...
def pack_expanded(
    weight_format: int,
    quantization: Quantization,
    elements: int,
    stride: int,
    out_features: int,
    in_features: int,
    scales: int,
    offsets: int,
    packed: int,
    every: int,
) -> None: ...
def look_up_packed_bf16(
    packed: int, out_features: int, in_features: int, row_ids: int, num_ids: int, rows: int
) -> None: ...
def look_up_packed_float(
    packed: int, out_features: int, in_features: int, row_ids: int, num_ids: int, rows: int
) -> None: ...
def look_up_quantized(
    weight_format: int,
    quantization: Quantization,
    packed: int,
    out_features: int,
    in_features: int,
    row_ids: int,
    num_ids: int,
    values: int,
) -> None: ...
def look_up_expanded(
    weight_format: int,
    quantization: Quantization,
    packed: int,
    out_features: int,
    in_features: int,
    row_ids: int,
    num_ids: int,
    values: int,
) -> None: ...
def convert(values: int, value_type: int, results: int, result_type: int, count: int) -> None: ...
def digest(memory: int, num_bytes: int) -> int: ...
def read_file(file: int, offset: int, memory: int, num_bytes: int) -> int: ...
def round_to_nearest(
    rows: int, num_rows: int, width: int, group_size: int, is_int4: bool, elements: int, scales: int
) -> None: ...
def rotary_table(
    frequencies: int, num_pairs: int, first_position: int, num_positions: int, scale: float, out: int
) -> None: ...
def piece_merges(
    characters: int, stops: int, ranks: int, is_result: int, num_pieces: int, firsts: int, seconds: int
) -> bool: ...
def all_finite_bf16(values: int, count: int) -> bool: ...
def all_finite_float(values: int, count: int) -> bool: ...
def read_blocks(
    block_type: int,
    rows: int,
    stride: int,
    num_rows: int,
    blocks_per_row: int,
    elements: int,
    scales: int,
    minimums: int,
) -> bool: ...
def copy_blocks(block_type: int, rows: int, stride: int, num_rows: int, blocks_per_row: int, copy: int) -> bool: ...
def read_block_values(
    block_type: int, rows: int, stride: int, num_rows: int, blocks_per_row: int, values: int
) -> None: ...
def look_up_blocks(
    block_type: int, table: int, num_rows: int, blocks_per_row: int, row_ids: int, num_ids: int, values: int
) -> None: ...
def swap_blocks(
    sources: list[int], destinations: list[int], block_bytes: int, src: int, dst: int, num_copies: int
) -> None: ...
def choose_tokens(
    logits: int,
    num_rows: int,
    vocab_size: int,
    stride: int,
    temperatures: int,
    log_min_ps: int,
    top_ks: int,
    top_ps: int,
    uniforms: int,
    tokens: int,
) -> None: ...
def mask_logits(
    logits: int, vocab_size: int, stride: int, num_entries: int, rows: int, bits: int, num_words: int
) -> None: ...
def top_logprobs(
    logits: int,
    vocab_size: int,
    stride: int,
    num_rows: int,
    rows: int,
    tokens: int,
    counts: int,
    width: int,
    ids: int,
    logprobs: int,
    ranks: int,
) -> None: ...
def penalize(
    logits: int,
    stride: int,
    vocab_size: int,
    token_ids: int,
    token_stride: int,
    num_entries: int,
    logit_rows: int,
    token_rows: int,
    num_tokens: int,
    num_prompt_tokens: int,
    repetition: int,
    presence: int,
    frequency: int,
) -> None: ...
def draw_uniforms(seeds: int, indices: int, count: int, numbers: int) -> None: ...
def fail_in_chunk(num_chunks: int, failing: int, in_helper: bool) -> int: ...

class Activation:
    none: Activation
    silu_and_mul: Activation
    gelu_tanh: Activation
    gelu: Activation
    relu: Activation
    relu2: Activation
    quick_gelu: Activation
    gelu_and_mul: Activation
    gelu_tanh_and_mul: Activation
    clamped_silu_and_mul: Activation

class LayerCache:
    def __init__(self, keys: int, values: int, kv_format: int, key_scale: float, value_scale: float) -> None: ...

class NormWeights:
    def __init__(
        self, weight: int, bias: int, eps: float, is_layer_norm: bool, is_wide: bool, offset: float, num_heads: int
    ) -> None: ...

class Offsets:
    zero_point: Offsets
    zero_points: Offsets
    minimums: Offsets

class Quantization:
    def __init__(
        self, group_size: int, offsets: Offsets, zero_point: int, order: int, groups: int, codebook: int
    ) -> None: ...

class LinearWeights:
    def __init__(
        self,
        packed: int,
        bias: int,
        in_features: int,
        out_features: int,
        activation: Activation,
        weight_format: int,
        quantization: Quantization,
    ) -> None: ...

class ColumnExchange:
    def __init__(self, gather: int, context: int) -> None: ...

class SumExchange:
    def __init__(self, call: int, context: int) -> None: ...

class Routing:
    def __init__(
        self,
        num_chosen: int,
        is_normalized: bool,
        has_shared: bool,
        is_sigmoid: bool,
        is_shared_scored: bool,
        factor: float,
        num_groups: int,
        num_kept_groups: int,
        num_group_keys: int,
        bias: int,
        scales: int,
    ) -> None: ...

class ExpertWeights:
    def __init__(
        self,
        router: LinearWeights,
        layers_in: list[LinearWeights],
        layers_out: list[LinearWeights],
        routing: Routing,
        routed_exchange: ColumnExchange,
        shared_exchange: ColumnExchange,
        result_exchange: SumExchange,
    ) -> None: ...

class Heads:
    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None: ...

class Buffer:
    def __init__(self, width: int, base: int, offset: int, is_external: bool) -> None: ...

class NormOp:
    def __init__(self, x: int, residual: int, summed: int, out: int, norm: NormWeights) -> None: ...

class LinearOp:
    def __init__(self, x: int, out: int, number: int, layer: LinearWeights) -> None: ...

def low_rank_product_bf16(
    inner: int, num_rows: int, rank: int, inner_stride: int, packed: int, num_outputs: int, out: int, out_stride: int
) -> None: ...
def low_rank_product_float(
    inner: int, num_rows: int, rank: int, inner_stride: int, packed: int, num_outputs: int, out: int, out_stride: int
) -> None: ...

class LowRankPart:
    def __init__(self, packed: int, first_input: int, rank: int, first_output: int, num_outputs: int) -> None: ...

class LowRankFactors:
    def __init__(self, packed: int, rank: int, parts: list[LowRankPart]) -> None: ...

class AdapterFactors:
    def __init__(self, layers: list[LowRankFactors]) -> None: ...

class ExpertsOp:
    def __init__(self, x: int, scored: int, out: int, weights: ExpertWeights) -> None: ...

class QKNormOp:
    def __init__(
        self,
        query: int,
        key: int,
        query_norm: NormWeights,
        key_norm: NormWeights,
        num_query_rows: int,
        query_width: int,
        num_key_rows: int,
        key_width: int,
    ) -> None: ...

class HeadNormOp:
    def __init__(self, x: int, out: int, norm: NormWeights, num_rows: int, width: int) -> None: ...

class RotaryParameters:
    def __init__(
        self, heads: Heads, cos_sin: int, rotary_dim: int, is_interleaved: bool, rotary_start: int
    ) -> None: ...

class RotaryWriteOp:
    def __init__(self, query: int, key: int, value: int, layer: int, rotary: RotaryParameters) -> None: ...

class AttentionParameters:
    def __init__(self, heads: Heads, *fields: float) -> None: ...  # as in csrc/kernels.hpp

class AttentionOp:
    def __init__(self, query: int, out: int, layer: int, attention: AttentionParameters) -> None: ...

class ShortConvOp:
    def __init__(self, x: int, out: int, layer: int, weight: int, bias: int, taps: int, length: int) -> None: ...

class DeltaNetWeights:
    def __init__(
        self,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        has_row_decays: bool,
        taps: int,
        length: int,
        conv_weight: int,
        rate: int,
        rate_bias: int,
        norm_weight: int,
        norm_eps: float,
        max_share: float,
        is_tiled: bool,
        is_gate_sigmoid: bool,
    ) -> None: ...

class DeltaNetOp:
    def __init__(
        self, x: int, gates: int, shares: int, decays: int, out: int, layer: int, weights: DeltaNetWeights
    ) -> None: ...

class NormSpan:
    def __init__(self, exchange: SumExchange, num_groups: int, first_group: int, width: int) -> None: ...

class MambaWeights:
    def __init__(
        self,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        length: int,
        conv_weight: int,
        conv_bias: int,
        rate: int,
        rate_bias: int,
        skip: int,
        norm_weight: int,
        norm_eps: float,
        gate_factor: float,
        rate_factor: float,
        is_norm_first: bool,
        span: NormSpan,
    ) -> None: ...

class MambaOp:
    def __init__(self, x: int, out: int, layer: int, weights: MambaWeights) -> None: ...

class GateOp:
    def __init__(self, x: int, gate: int, is_sigmoid: bool) -> None: ...

class PositionScaleOp:
    def __init__(self, x: int, factors: int) -> None: ...

class SumOp:
    def __init__(self, x: int, y: int, out: int, factor: float, limit: float) -> None: ...

class GatherOp:
    def __init__(self, x: int, out: int, exchange: ColumnExchange) -> None: ...

class SummedLinearOp:
    def __init__(self, x: int, out: int, number: int, layer: LinearWeights, exchange: SumExchange) -> None: ...

class HeadLinearOp:
    def __init__(self, x: int, out: int, passed: int, heads: list[LinearWeights]) -> None: ...

class InterruptedExchangeError(RuntimeError): ...

class RankGroup:
    header_bytes: int
    def __init__(self, memory: int, rank: int, num_ranks: int, region_bytes: int) -> None: ...
    def meet(self) -> None: ...
    def interrupt(self) -> None: ...
    def reset(self) -> None: ...
    def resume(self) -> None: ...

class ColumnGather:
    def __init__(self, group: RankGroup, bounds: list[int]) -> None: ...
    def address(self) -> tuple[int, int]: ...
    def gather(self, own: int, rows: int, num_rows: int, element_bytes: int) -> None: ...

class PartialSum:
    def __init__(self, group: RankGroup, width: int) -> None: ...
    def address(self) -> tuple[int, int]: ...
    def sum(self, own: int, out: int, num_rows: int, out_is_float: bool) -> None: ...

class PythonExchange:
    def __init__(self, function: Callable[[int, int, int, int], None]) -> None: ...
    def gather_address(self) -> tuple[int, int]: ...
    def sum_address(self) -> tuple[int, int]: ...

class CountLayerOp:
    def __init__(self, progress: int) -> None: ...

class Rows:
    def __init__(self, token_ids: int, max_rows: int, max_len: int, max_drafts: int) -> None: ...

class SuffixRules:
    def __init__(
        self,
        min_run: int,
        max_run: int,
        max_places: int,
        min_share: float,
        num_texts: int,
        max_text: int,
        chunk: int,
        overlap: int,
        gap: int,
    ) -> None: ...

class NgramLookup:
    def __init__(self, rows: Rows, min_size: int, max_size: int) -> None: ...
    def reset(self, row: int) -> None: ...
    def draft(self, rows: NDArray[np.int64], last: NDArray[np.int64]) -> dict[int, list[int]]: ...

class SuffixLookup:
    def __init__(self, rows: Rows, rules: SuffixRules) -> None: ...
    def reset(self, row: int, num_tokens: int, text: int) -> None: ...
    def clear(self, text: int) -> None: ...
    def draft(self, rows: NDArray[np.int64], last: NDArray[np.int64]) -> dict[int, list[int]]: ...
