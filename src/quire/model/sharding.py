"""Sharding: the part of each layer that a rank has, and the exchanges that a decoder asks for.

With `gather` every linear layer is split by its outputs, so that each output stays one sum in one order, and TP N has
the bits of TP 1 (docs/decisions/0022). With `reduce` the layers behind attention and the feed-forward's activation are
split by their inputs instead, and their partial sums are added (Shoeybi et al. 2019). No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from quire.core.errors import ConfigError
from quire.model.shapes import LinearShape
from quire.model.spec import Attention, DecoderSpec, DeltaNet, LatentAttention, LayerSpec, Mamba, Mixer, ShortConv

if TYPE_CHECKING:  # they load NumPy, and options are read without it
    from quire.kernels.layers import GatherHook, Linear, SumHook

ADDED_BYTES = 64 << 10  # partial sums of a rank that one exchange moves; more take two (csrc/gather.cpp)
HEAD_OPS = "qkv", "query_up", "kv_up"  # linear layers of attention that are divided by heads
DELTA_OPS = (  # linear layers of gated delta nets
    "delta_in", "delta_rates", "gate_down", "gate_up", "decay_down", "decay_up"
)  # fmt: skip
MAMBA_OPS = ("mamba_in",)  # linear layers of Mamba-2
WHOLE_OPS = "layer_gate", "layer_out", "latent_in", "latent_out"  # each rank has them whole, where ranks add
STRIP_OUTPUTS = 16  # outputs that are packed together; formats of weights are cut at multiples of it
Range = tuple[int, int]  # [start, stop)
Mode = Literal["gather", "reduce"]
WithHeads = Attention | DeltaNet | Mamba


@dataclass(frozen=True, slots=True)
class Cut:
    """Columns by rank: rank r has [bounds[r], bounds[r + 1])."""

    bounds: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.bounds[-1]

    def of(self, rank: int) -> Range:
        """Return the columns of a rank."""
        return self.bounds[rank], self.bounds[rank + 1]


class HeadRange(NamedTuple):
    """Consecutive heads of one rank, and the KV heads that they read; ranks may share a KV head.

    Of a gated delta net those are its value heads, and its key heads; of a Mamba-2 its heads, and its groups.
    """

    query: Range
    kv: Range

    @property
    def num_heads(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv[1] - self.kv[0]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a model that is split over `num_ranks`."""

    rank: int
    num_ranks: int
    mode: Mode = "gather"

    def cut(self, width: int, multiple: int = 1) -> Cut:
        """Return the ranks' outputs of a layer: whole strips where there are enough of them, as even as they can be.

        The cuts are at multiples of `multiple`, too. Raises ConfigError if that leaves a rank without a part.
        """
        unit = STRIP_OUTPUTS
        while unit > 1 and width < unit * self.num_ranks:
            unit //= 2
        unit = math.lcm(unit, multiple)
        if width <= unit * (self.num_ranks - 1):
            raise ConfigError(
                f"tensor_parallel_mode {self.mode!r}: {width} columns cut at multiples of {unit} are not enough for "
                f"{self.num_ranks} ranks"
            )
        return Cut(tuple(min(bound * unit, width) for bound in _even_bounds(-(-width // unit), self.num_ranks)))

    def heads(self, mixer: WithHeads) -> HeadRange:
        """Return the heads of this rank."""
        return head_ranges(mixer, self.num_ranks, self.mode)[self.rank]

    def mixed_cut(self, mixer: Mixer) -> Cut:
        """Return the ranks' columns of what a mixer returns, before its last projection."""
        if isinstance(mixer, ShortConv):
            return self.cut(mixer.width)
        dim = mixer.value_dim if isinstance(mixer, DeltaNet) else mixer.width // mixer.num_heads
        return Cut((0, *(heads.query[1] * dim for heads in head_ranges(mixer, self.num_ranks, self.mode))))

    def ranges(self, shape: LinearShape) -> list[Range]:
        """Return this rank's outputs of a linear layer that is not divided by heads, count by count."""
        return [self.cut(count).of(self.rank) for count in shape.num_rows]

    def adapted_ranges(self, layer: LayerSpec, op: str, shape: LinearShape) -> list[Range]:
        """Return this rank's outputs of the linear op `op` of a layer, `qkv` or another one, count by count."""
        whole = [(0, count) for count in shape.num_rows]
        if self.mode == "reduce" and op in WHOLE_OPS:
            return whole
        if isinstance(layer.mixer, DeltaNet) and op in DELTA_OPS:
            return self.delta_ranges(layer.mixer, op)
        if op in MAMBA_OPS:
            return self.mamba_ranges(next(each for each in layer.mixers if isinstance(each, Mamba)))
        if layer.attention is None or op not in HEAD_OPS:
            return self.ranges(shape)
        if isinstance(layer.attention, LatentAttention):
            return self.latent_ranges(layer.attention, op)
        # A norm over all heads needs the outputs of all.
        return whole if layer.attention.is_query_key_norm_over_heads else list(self.qkv_ranges(layer.attention))

    def qkv_ranges(self, attention: Attention) -> tuple[Range, ...]:
        """Return this rank's outputs of the query, key and value projections, of those that there are."""
        query, kv = ((start * attention.head_dim, stop * attention.head_dim) for start, stop in self.heads(attention))
        if attention.has_output_gate:
            query = 2 * query[0], 2 * query[1]
        return (query, kv, kv)[: attention.num_projected]

    def delta_ranges(self, net: DeltaNet, op: str) -> list[Range]:
        """Return this rank's outputs of a linear op of a gated delta net: those of its heads."""
        (start, stop), (first, last) = self.heads(net)
        keys, values = (first * net.key_dim, last * net.key_dim), (start * net.value_dim, stop * net.value_dim)
        whole, decays = (0, net.low_rank), (start * net.key_dim, stop * net.key_dim)
        own = {
            "delta_in": [keys, keys, values, values], "delta_rates": [(start, stop)] * 2, "gate_down": [whole],
            "gate_up": [values], "decay_down": [whole], "decay_up": [decays],
        }  # fmt: skip
        is_whole = net.low_rank == 0 or len(own[op]) == 1
        return own[op] if is_whole else own[op][:-1]  # gates and decays have layers of their own

    def mamba_ranges(self, mamba: Mamba) -> list[Range]:
        """Return this rank's gates, values, keys, queries and time steps of a Mamba-2: those of its heads.

        Of one that each rank has whole, its part of all columns.
        """
        if has_whole(mamba, self.num_ranks, self.mode):
            first, last = self.cut(sum(mamba.sections)).of(self.rank)
            starts = accumulate(mamba.sections, initial=0)
            ends = ([min(max(end - start, 0), count) for end in (first, last)]
                    for start, count in zip(starts, mamba.sections, strict=False))  # fmt: skip
            return [(own_start, own_stop) for own_start, own_stop in ends]
        (start, stop), (first, last) = self.heads(mamba)
        values = start * mamba.head_dim, stop * mamba.head_dim
        keys = first * mamba.state_dim, last * mamba.state_dim
        return [values, values, keys, keys, (start, stop)]

    def latent_ranges(self, latent: LatentAttention, op: str) -> list[Range]:
        """Return this rank's outputs of a linear op of attention over latents, which every rank has whole."""
        (start, stop), whole = self.heads(latent).query, (0, latent.head_dim)
        queries = start * latent.query_dim, stop * latent.query_dim
        if op == "qkv":
            return [(0, latent.query_rank) if latent.query_rank else queries, whole]
        if op == "query_up":
            return [queries]
        return [(start * count, stop * count) for count in (latent.nope_dim, latent.expanded_dim)]

    def local_spec(self, spec: DecoderSpec) -> DecoderSpec:
        """Return a spec with this rank's heads and channels: its KV cache is that of a rank."""
        return spec.with_layers(self._local_layer)

    def local_net(self, net: DeltaNet) -> DeltaNet:
        """Return a gated delta net of this rank's heads."""
        heads = self.heads(net)
        return replace(net, num_key_heads=heads.num_kv_heads, num_value_heads=heads.num_heads)

    def local_mamba(self, mamba: Mamba) -> Mamba:
        """Return a Mamba-2 of this rank's heads."""
        heads = self.heads(mamba)
        return replace(mamba, num_groups=heads.num_kv_heads, num_heads=heads.num_heads)

    def _local_layer(self, layer: LayerSpec) -> LayerSpec:
        if layer.beside is not None:
            layer = replace(layer, beside=self.local_mamba(layer.beside))
        if isinstance(layer.mixer, Mamba):
            return replace(layer, mixer=self.local_mamba(layer.mixer))
        if isinstance(layer.mixer, ShortConv):
            first, stop = self.mixed_cut(layer.mixer).of(self.rank)
            return replace(layer, mixer=replace(layer.mixer, width=stop - first))
        if isinstance(layer.mixer, DeltaNet):
            return replace(layer, mixer=self.local_net(layer.mixer))
        if layer.attention is None:
            return layer
        heads = self.heads(layer.attention)
        return layer.with_attention(num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)


def head_ranges(mixer: WithHeads, num_ranks: int, mode: Mode = "gather") -> list[HeadRange]:
    """Return the heads of each rank.

    KV heads are divided, each with the query heads that read it; where there are fewer than ranks, the query heads of a
    KV head are divided among the ranks that have a copy of it. Raises ConfigError if there are more ranks than heads.
    """
    kind = "attention heads"
    if isinstance(mixer, DeltaNet):
        num_heads, num_kv_heads, kind = mixer.num_value_heads, mixer.num_key_heads, "value heads of gated delta nets"
    elif isinstance(mixer, Mamba):
        num_heads, num_kv_heads, kind = mixer.num_heads, mixer.num_groups, "heads of Mamba-2"
        if has_whole(mixer, num_ranks, mode):
            return [HeadRange((0, num_heads), (0, num_kv_heads))] * num_ranks
    else:
        num_heads, num_kv_heads = mixer.num_heads, mixer.num_kv_heads
    if num_ranks > num_heads:
        raise ConfigError(f"tensor_parallel_size {num_ranks} is above the model's {num_heads} {kind}")
    if isinstance(mixer, DeltaNet) and mixer.is_tiled:
        return _tiled_ranges(mixer, num_ranks)
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        bounds = _even_bounds(num_kv_heads, num_ranks)
        return [HeadRange((a * group, b * group), (a, b)) for a, b in pairwise(bounds)]
    found = []
    ranks = _even_bounds(num_ranks, num_kv_heads)  # rank r and those after it have copies of a KV head
    for kv_head in range(num_kv_heads):
        bounds = _even_bounds(group, ranks[kv_head + 1] - ranks[kv_head])
        first = kv_head * group
        found += [HeadRange((first + a, first + b), (kv_head, kv_head + 1)) for a, b in pairwise(bounds)]
    return found


def divides_norm(mamba: Mamba, num_ranks: int) -> bool:
    """Return whether ranks would divide a group of a Mamba-2 that is normed together."""
    return mamba.has_norm and num_ranks > mamba.num_groups


def has_whole(mamba: Mamba, num_ranks: int, mode: Mode) -> bool:
    """Return whether each rank computes all heads of a Mamba-2: parts of a norm's sum have other bits than all."""
    return mode == "gather" and divides_norm(mamba, num_ranks)


def _tiled_ranges(net: DeltaNet, num_ranks: int) -> list[HeadRange]:
    """Return the heads of each rank where value head i reads key head i % num_key_heads: equal parts.

    A part reads all key heads, as often each, or some that follow each other. Raises ConfigError where it does not.
    """
    num_heads, num_keys = net.num_value_heads, net.num_key_heads
    size = num_heads // num_ranks
    if num_heads % num_ranks or (size % num_keys and num_keys % size):
        raise ConfigError(
            f"tensor_parallel_size {num_ranks}: {num_heads} value heads over {num_keys} key heads of gated delta nets, "
            "in the order of a GGUF file, do not divide among so many ranks"
        )
    starts = range(0, num_heads, size)
    return [HeadRange((each, each + size), (each % num_keys, each % num_keys + min(size, num_keys))) for each in starts]


def check_shardable(spec: DecoderSpec, num_ranks: int, mode: Mode = "gather") -> None:
    """Raise ConfigError for a model that cannot be split over so many ranks."""
    mixers: list[WithHeads] = [*spec.attentions, *spec.delta_nets, *spec.mambas]
    for mixer in mixers:
        head_ranges(mixer, num_ranks, mode)
    part = next((part.name for layer in spec.layers for part in layer.parts), None)
    if part is not None:
        raise ConfigError(f"tensor_parallel_size {num_ranks}: layers with the part {part!r} are not supported yet")
    sizes = [size for feed_forward in spec.feed_forwards for size in feed_forward.sizes]
    narrowest = min([spec.hidden_size, spec.vocab_size, *sizes])
    if narrowest < num_ranks:
        raise ConfigError(f"tensor_parallel_size {num_ranks} is above the {narrowest} outputs of a layer of the model")


def _even_bounds(count: int, num_parts: int) -> list[int]:
    """Return where parts of `count` things begin, and the end; the first parts have one more if they do not divide."""
    sizes = [count // num_parts + (part < count % num_parts) for part in range(num_parts)]
    return list(accumulate(sizes, initial=0))


def shifted(ranges: Sequence[Range], num_rows: Sequence[int]) -> list[Range]:
    """Return ranges of modules as those of one that has the modules' rows on top of each other."""
    starts = accumulate(num_rows, initial=0)
    return [(first + start, first + stop) for (start, stop), first in zip(ranges, starts, strict=False)]


class Ranks(Protocol):
    """A rank among others. Each of them calls the same exchanges in the same order, with the same number of rows."""

    @property
    def shard(self) -> Shard:
        """This rank's part of the model."""

    def gather(self, cut: Cut) -> "GatherHook":
        """Return the exchange of an activation that is divided like this."""

    def sum(self, width: int) -> "SumHook":
        """Return the exchange of partial sums of an activation of this width."""

    def joined_head(self, head: "Linear", cut: Cut) -> "Linear":
        """Return the head of all ranks from this one's, which has its columns of the vocabulary.

        Its result, float32 [num_rows, vocab_size], is defined on rank 0 alone, until the next call.
        """
