"""Rotary frequencies and tables, as a config asks for them in the spelling of transformers 5 or the older one.

All is read, checked and computed here, without torch. A scaling also says how long a sequence may be, as in vLLM:
the original length times its factor (linear, dynamic, yarn); llama3 configs state the scaled length. A table has the
same bits on every machine (docs/decisions/0032).
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from quire.core.arrays import FLOAT32, Array, address, empty
from quire.extension.isas import usable_isas
from quire.model.config_reader import MAX_POSITIONS, ConfigReader
from quire.model.spec import Rotary, SpecError

POSITIONS_AT_ONCE = 1 << 11  # some milliseconds, which a step takes longer when a sequence reaches new ones
DEFAULT_THETA = 10_000.0


def rotary_table(frequencies: Array, num_positions: int, scale: float = 1.0) -> Array:
    """Return cosines and sines of every position, float32 [num_positions, rotary_dim]: cosines first, then sines.

    frequencies float32 [rotary_dim / 2], radians per position; `scale` multiplies both (YaRN's attention factor).
    An angle is rounded to float32, as models are trained; the rest is computed in double and rounded once.
    """
    table = RotaryTable(frequencies, num_positions, scale)
    table.fill(num_positions)
    return table.values


class RotaryTable:
    """The table of `rotary_table`, filled as far as sequences reach: what is not filled takes no memory.

    `num_free`: rows behind the last position, which are the caller's.
    """

    def __init__(self, frequencies: Array, num_positions: int, scale: float = 1.0, num_free: int = 0) -> None:
        assert (frequencies.dtype, frequencies.flags.c_contiguous) == (FLOAT32, True), "frequencies of another form"
        self.values = empty((num_positions + num_free, 2 * len(frequencies)), FLOAT32)
        self.num_positions, self.num_filled = num_positions, 0
        self._frequencies, self._scale = frequencies, scale

    def fill(self, num_positions: int) -> None:
        """Fill the rows of the first `num_positions` positions, and up to POSITIONS_AT_ONCE - 1 more."""
        stop = min(-(-num_positions // POSITIONS_AT_ONCE) * POSITIONS_AT_ONCE, self.num_positions)
        for begin in range(self.num_filled, stop, POSITIONS_AT_ONCE):
            self._fill_portion(begin, self.values[begin : min(begin + POSITIONS_AT_ONCE, stop)])
        self.num_filled = max(self.num_filled, stop)

    def _fill_portion(self, begin: int, rows: Array) -> None:
        frequencies, half = self._frequencies, len(self._frequencies)
        if usable_isas():
            from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

            _kernels.rotary_table(address(frequencies), half, begin, len(rows), self._scale, address(rows))
            return
        positions = np.arange(begin, begin + len(rows), dtype=np.float32)
        angles = np.outer(positions, frequencies).astype(np.float64)
        rows[:, :half], rows[:, half:] = np.cos(angles) * self._scale, np.sin(angles) * self._scale


class RotaryTables:
    """The tables of a model, filled together. `num_filled`: positions that all of them have.

    `axes`: for models with several positions of a token, that of each pair of dimensions.
    """

    def __init__(self, tables: Iterable[RotaryTable], axes: Sequence[int] = ()) -> None:
        self.tables, self._axes = list(tables), axes
        self.num_filled = 0 if self.tables else sys.maxsize

    def fill(self, num_positions: int) -> None:
        """Fill every table as far as the positions of a step reach; a block may reach past the last position."""
        for table in self.tables:
            table.fill(num_positions)
        partly = (table.num_filled for table in self.tables if table.num_filled < table.num_positions)
        self.num_filled = min(partly, default=sys.maxsize)

    def place(self, places: Array) -> Array:
        """Write rows for tokens with several positions, int64 [num_axes, num_tokens]; return the positions of the rows.

        They are behind those of tokens with one position, until the next call. Wang et al. 2024 (Qwen2-VL), 2.1.
        """
        num_tokens, (first, *others) = places.shape[1], {table.num_positions for table in self.tables}
        pairs = np.array([*self._axes, *self._axes])
        assert not others, "tables of several lengths"
        for table in self.tables:
            assert num_tokens <= len(table.values) - first, f"{num_tokens} tokens with several positions in a step"
            table.values[first : first + num_tokens] = table.values[places[pairs].T, np.arange(len(pairs))]
        return np.arange(first, first + num_tokens)


def rotary_from_config(
    config: ConfigReader, head_dim: int, max_position_embeddings: int, *, partial: float | None = None
) -> Rotary:
    """Return the frequencies that `config` asks for. Raises ModelError for a scaling that is not known.

    partial: the default of `partial_rotary_factor`, the fraction of a head's dimensions that is rotated; None: all are.
    """
    rope = _rope_section(config, max_position_embeddings)
    read = rope.choice("rope_type", SCALINGS, default="default")
    if read is not _proportional:
        head_dim = _rotated_dim(rope, head_dim, partial)
    return read(rope, Rotary(head_dim, rope.number("rope_theta", DEFAULT_THETA), max_position_embeddings))


def _rotated_dim(rope: ConfigReader, head_dim: int, partial: float | None) -> int:
    if partial is None:
        rope.reject("partial_rotary_factor", 1, why="all dimensions of a head are rotated")
        return head_dim
    return int(head_dim * rope.number("partial_rotary_factor", partial))


def rotary_of_layer_type(
    config: ConfigReader, layer_type: str, theta: float, head_dim: int, max_position_embeddings: int
) -> Rotary:
    """Return the frequencies of a type of layers, from its section of `rope_parameters`, if there is one.

    Older configs have one section, of full attention: windowed layers have no scaling. `theta`: the default.
    """
    sections = config.section("rope_parameters")
    if sections and not any(isinstance(value, dict) for value in sections.values()):
        config, sections = config.replaced(rope_scaling=sections), {}
    section = config.nested("rope_parameters", sections).section(layer_type)
    if not section and layer_type == "full_attention":
        section = config.section("rope_scaling")
    section = {"rope_theta": theta} | section
    return rotary_from_config(
        config.replaced(rope_theta=None, rope_scaling=None, rope_parameters=section), head_dim, max_position_embeddings
    )


def _rope_section(config: ConfigReader, max_position_embeddings: int) -> ConfigReader:
    """Gather the keys from where they may stand. Precedence as in transformers: rope_scaling over rope_parameters,
    both over the top level; only the original length counts at the top level first.
    """
    values = config.section("rope_scaling") or config.section("rope_parameters")
    if any(isinstance(value, dict) for value in values.values()):
        raise config.error("rope parameters that differ by layer type are not supported yet")
    merged: dict[str, object] = {"original_max_position_embeddings": max_position_embeddings}
    merged |= {key: config.raw(key) for key in ("rope_theta", "partial_rotary_factor")}
    merged |= {"rope_type": values.get("type")}
    merged |= {key: value for key, value in values.items() if value is not None or key not in merged}
    if config.has("original_max_position_embeddings"):
        merged["original_max_position_embeddings"] = config.raw("original_max_position_embeddings")
    return config.nested("rope parameters", merged)


def _default(rope: ConfigReader, rotary: Rotary) -> Rotary:
    """One frequency per pair, falling from 1 to about 1 / theta radians per position. Su et al. 2021, section 3.4."""
    return rotary


def _proportional(rope: ConfigReader, rotary: Rotary) -> Rotary:
    """All pairs of a head, but only the first ones turn, with the frequencies that they have where all do (Gemma 4)."""
    part = rope.number("partial_rotary_factor", 1.0)
    if part > 1:
        raise rope.error(f"partial_rotary_factor must be a number up to 1, got {part}")
    num_pairs, num_turning = rotary.head_dim // 2, int(part * rotary.head_dim // 2)
    divisors = (1.0,) * num_turning + (math.inf,) * (num_pairs - num_turning)
    return replace(rotary, factor=rope.number("factor", 1.0), divisors=divisors)


def _linear(rope: ConfigReader, rotary: Rotary) -> Rotary:
    """All positions pressed together by `factor`. Chen et al. 2023 (position interpolation)."""
    factor = rope.number("factor")
    return replace(rotary, factor=factor, max_positions=_scaled_length(rotary.max_positions, factor))


def _dynamic(rope: ConfigReader, rotary: Rotary) -> Rotary:
    """A larger theta where sequences beyond the original length are asked for (NTK-aware; bloc97 and emozilla 2023).

    One theta for all positions, that of the longest sequence, as in vLLM: a theta that follows the current length, as
    in transformers, would make keys in the cache depend on when they were computed. docs/decisions/0014.
    """
    factor, original = rope.number("factor"), rotary.max_positions
    if rotary.head_dim < 4:
        raise rope.error(f"dynamic scaling needs heads of at least 4 dimensions, got {rotary.head_dim}")
    return replace(rotary, max_positions=_scaled_length(original, factor), dynamic=(original, factor))


def _scaled_length(original: float, factor: float) -> int:
    """Return the longest sequence that a scaling provides: at least 1 position, at most MAX_POSITIONS."""
    return int(min(max(original * factor, 1), MAX_POSITIONS))


def _llama3(rope: ConfigReader, rotary: Rotary) -> Rotary:
    """Long waves slowed down by `factor`, short ones kept, a ramp between. Llama 3.1 (Grattafiori et al. 2024)."""
    factor, original = rope.number("factor"), rope.number("original_max_position_embeddings")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low == high:
        raise rope.error(f"low_freq_factor and high_freq_factor must differ, got {low} twice")
    return replace(rotary, factor=factor, turns=(original, low, high))


def _yarn(rope: ConfigReader, rotary: Rotary) -> Rotary:
    """Pairs that turn often in the original length kept, the others interpolated, a ramp between. Peng et al. 2023.

    Null is not the default, as in transformers: `truncate` null is false, `factor` null the ratio of the lengths.
    """
    original, head_dim = rope.number("original_max_position_embeddings"), rotary.head_dim
    factor = rotary.max_positions / original if rope.is_null("factor") else rope.number("factor")
    first = _pair_turning(rope, head_dim, rope.number("beta_fast", 32))
    last = _pair_turning(rope, head_dim, rope.number("beta_slow", 1))
    if not rope.is_null("truncate") and rope.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    ramp = max(first, 0), min(last, head_dim - 1)
    longest = _scaled_length(original, factor)
    return replace(rotary, factor=factor, ramp=ramp, scale=_yarn_scale(rope, factor), max_positions=longest)


def _longrope(rope: ConfigReader, rotary: Rotary) -> Rotary:
    """One divisor per frequency, with a second set for sequences beyond the original length. Ding et al. 2024.

    The set is the same for all positions, as with dynamic scaling, and is chosen by the longest sequence that is
    served. The default for that is the config's length.
    """
    original = rope.number("original_max_position_embeddings")
    factor = rope.number("factor", rotary.max_positions / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    if rope.has("attention_factor"):
        scale = rope.number("attention_factor")
    short, long = (rope.numbers(key, rotary.head_dim // 2) for key in ("short_factor", "long_factor"))
    return replace(rotary, scale=scale, divisors=short, long=(int(original), long))


def _pair_turning(rope: ConfigReader, head_dim: int, turns: float) -> float:
    """Index (a real number) of the pair that turns `turns` times within the original length."""
    theta, original = rope.number("rope_theta", DEFAULT_THETA), rope.number("original_max_position_embeddings")
    if theta == 1:
        raise rope.error("rope_theta must not be 1 with yarn")
    return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_scale(rope: ConfigReader, factor: float) -> float:
    """The factor on cosines and sines that keeps attention as sharp as in training. Peng et al. 2023, section 3.4."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.raw("mscale") and rope.raw("mscale_all_dim"):
        return sharpness(rope.number("mscale")) / sharpness(rope.number("mscale_all_dim"))
    return sharpness(1.0)


SCALINGS: dict[str, Callable[[ConfigReader, Rotary], Rotary]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def inverse_frequencies(rotary: Rotary, num_positions: int) -> Array:
    """Return radians per position of each pair of dimensions, float32 [head_dim / 2]. SpecError if one is infinite.

    `num_positions`: the longest sequence to be served. Dynamic scaling applies only if that is beyond the original
    length, and then as for the longest sequence that the scaling provides: results do not depend on by how much. So do
    longrope's divisors of long sequences, for all positions.
    """
    with np.errstate(all="ignore"):
        found = _inverse_frequencies(rotary, num_positions)
    if not np.isfinite(found).all() or not math.isfinite(rotary.scale):
        raise SpecError("rotary frequencies are not finite")
    return found


def _inverse_frequencies(rotary: Rotary, num_positions: int) -> Array:
    exponents = np.arange(0, rotary.head_dim, 2, dtype=np.float32) / rotary.head_dim
    theta = np.float64(np.float32(_theta(rotary, num_positions)))
    per_radian = np.array([theta ** np.float64(each) for each in exponents]).astype(np.float32)  # the C library's pow
    if rotary.long is not None:
        divisors = rotary.long[1] if num_positions > rotary.long[0] else rotary.divisors
        return 1 / (np.array(divisors, FLOAT32) * per_radian)
    found = _scaled(rotary, per_radian)
    return found if rotary.divisors is None else found / np.array(rotary.divisors, FLOAT32)


def _theta(rotary: Rotary, num_positions: int) -> float:
    if rotary.dynamic is None or num_positions <= rotary.dynamic[0]:
        return rotary.theta
    (original, factor), head_dim = rotary.dynamic, rotary.head_dim
    stretched: float = (factor * rotary.max_positions / original - (factor - 1)) ** (head_dim / (head_dim - 2))
    return rotary.theta * stretched


def _scaled(rotary: Rotary, per_radian: Array) -> Array:
    if rotary.ramp is not None:
        return _interpolated(rotary, per_radian, *rotary.ramp)
    if rotary.turns is not None:
        return _slowed_down(rotary, 1 / per_radian, *rotary.turns)
    return 1 / per_radian / rotary.factor


def _slowed_down(rotary: Rotary, inv_freq: Array, original: float, low: float, high: float) -> Array:
    """Llama 3.1: pairs that turn fewer than `low` times in the original length slowed down, more than `high` kept."""
    wavelength = 2 * math.pi * (1 / inv_freq)  # rounded twice, as by PyTorch
    smooth = (original * (1 / wavelength) - low) / (high - low)
    ramp = (1 - smooth) * inv_freq / rotary.factor + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / rotary.factor, ramp)
    return np.where(wavelength < original / high, inv_freq, scaled)


def _interpolated(rotary: Rotary, per_radian: Array, first: float, last: float) -> Array:
    """YaRN: pairs before `first` kept, after `last` interpolated."""
    width = last - first or 0.001  # a ramp of one point: anything small, as in the original
    ramp = ((np.arange(len(per_radian), dtype=np.float32) - first) / width).clip(0, 1)
    kept = 1 - ramp
    interpolated: Array = 1 / (rotary.factor * per_radian) * (1 - kept) + 1 / per_radian * kept
    return interpolated
