"""LoRA folders in PEFT's form: the checked configuration, and factors scaled, fused like layers, packed."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, deserialize

from quire.core.arrays import BFLOAT16, FLOAT16, FLOAT32, MODEL_DTYPES, STORED_DTYPES, Array, concatenated, dtype_name
from quire.core.checks import shown
from quire.core.errors import ModelError
from quire.core.model_files import file_inside, read_bytes
from quire.kernels.back_end import BackEnd
from quire.kernels.conversion import all_finite, converted
from quire.kernels.layers import Linear
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.low_rank import AdapterWeights, FactorSizes, LowRankLayer, LowRankPart, Up
from quire.kernels.tensors import DType
from quire.model.shapes import LayerShapes, LinearShape
from quire.model.sharding import Range, Shard, shifted
from quire.model.spec import DecoderSpec
from quire.model.weights import gates_last, ungrouped

CONFIG_FILE = "adapter_config.json"
MAX_ALPHA = 1e6
# Options that change more than the two factors of a module, with the values that leave them off.
_REFUSED_OPTIONS: dict[str, str] = {
    "use_dora": "DoRA scales outputs by magnitudes of its own",
    "modules_to_save": "whole modules in place of the model's are not applied",
    "lora_bias": "biases of factors are not applied",
    "layer_replication": "layers are not replicated",
    "trainable_token_indices": "embeddings are not changed",
    "target_parameters": "only linear layers have factors",
    "alora_invocation_tokens": "an adapter is applied from the first token on",
    "use_qalora": "QALoRA pools the inputs of a layer",
    "use_bdlora": "block-diagonal factors are not applied",
    "arrow_config": "adapters are not combined",
    "corda_config": "it changes the weights of the model",
}
# Initializations that change the weights of the model, which an adapter of them needs.
_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_\-]|\.|\\\.)+\$?")


class Factor(NamedTuple):
    """The rank of a module's factors, and their scale."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scales of an adapter's modules."""

    rank: int
    alpha: float
    is_rank_stabilized: bool                 # scale alpha / sqrt(rank), not alpha / rank (Kalajdzievski 2023)
    rank_pattern: Mapping[str, int]          # keyed by the end of a module's name
    alpha_pattern: Mapping[str, float]

    def factor_of(self, module: str) -> Factor:
        """Return rank and scale of a module, by its full name in the model."""
        rank = _by_pattern(self.rank_pattern, module, self.rank)
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return Factor(rank, alpha / (rank**0.5 if self.is_rank_stabilized else rank))


def parse_config(content: bytes, path: Path) -> PeftConfig:
    """Return the configuration. ModelError for one that is broken, or asks for what is not served, by name."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type must be LORA, got {shown(config.get('peft_type'))}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"{path}: task_type must be CAUSAL_LM, got {shown(config['task_type'])}")
    for name, reason in _REFUSED_OPTIONS.items():
        if config.get(name):
            raise ModelError(f"{path}: {name} {shown(config[name])} is not supported: {reason}")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias must be none, got {shown(config['bias'])}: biases are those of the model")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGING_INITS):
        raise ModelError(
            f"{path}: init_lora_weights {shown(start)} is not supported: it changes the weights of the model; save the "
            "adapter as one of the unchanged model (path_initial_model_for_weight_conversion of PEFT)"
        )
    ranks, alphas = (_patterns(path, config, name) for name in ("rank_pattern", "alpha_pattern"))
    return PeftConfig(
        _rank(path, "r", config.get("r")),
        _alpha(path, "lora_alpha", config.get("lora_alpha")),
        _flag(path, "use_rslora", config.get("use_rslora", False)),
        {key: _rank(path, f"rank_pattern[{key!r:.80}]", value) for key, value in ranks},
        {key: _alpha(path, f"alpha_pattern[{key!r:.80}]", value) for key, value in alphas},
    )


def _rank(path: Path, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{path}: {name} must be an integer of at least 1, got {shown(value)}")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_ALPHA <= value <= MAX_ALPHA:  # type: ignore[operator]
        raise ModelError(f"{path}: {name} must be a number from {-MAX_ALPHA:g} to {MAX_ALPHA:g}, got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _flag(path: Path, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ModelError(f"{path}: {name} must be true or false, got {shown(value)}")
    return value


def _patterns(path: Path, config: Mapping[str, Any], name: str) -> list[tuple[str, object]]:
    """Return the entries of a pattern option. ModelError for keys that are regular expressions: they could run long."""
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise ModelError(f"{path}: {name} must be an object, got {shown(given)}")
    for key in given:
        if not _PATTERN.fullmatch(key):
            raise ModelError(f"{path}: {name} has the key {shown(key)}; keys must be names of modules or ends of them")
    return list(given.items())


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:  # noqa: ANN401 (a rank or an alpha)
    """Return the value of the first key that is the module's name or, after a dot, its end."""
    for key, value in patterns.items():
        name = key.removesuffix("$").replace("\\.", ".")
        if name.startswith("^"):
            if module == name[1:]:
                return value
        elif module == name or module.endswith(f".{name}"):
            return value
    return default


WEIGHTS_FILE = "adapter_model.safetensors"
HEADER_BYTES = 16 << 20  # the longest header of a file of weights
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_TEXT_MODEL = "model.", ""  # prefixes of a text model alone, and of its base model
_REFUSED = {
    "lora_magnitude_vector": "DoRA", "lora_embedding_": "factors of embeddings", "modules_to_save": "modules_to_save",
    ".bias": "biases", "lora_": "factors of another kind",
}  # fmt: skip


class AdapterTarget(NamedTuple):
    """A module that may have factors, of `num_rows` outputs and `width` inputs.

    `rows`: the outputs that the linear op has, on a rank of tensor parallelism some of them: its outputs from `first`
    on, of `all_rows`. `inputs`: those that it has; of ranks that add partial sums some of them, and the rank adds
    B (A x) of these to its own sums.
    """

    op: str
    first: int
    rows: tuple[Range, ...]
    all_rows: int
    num_rows: int
    width: int
    inputs: Range
    grouped: LinearShape | None = None  # shape of rows that the checkpoint stores in groups
    gated_head_dim: int | None = None   # rows are those of a query and of a gate for each head; None: no gates

    @property
    def num_outputs(self) -> int:
        """Outputs that the linear op has of the module."""
        return sum(stop - start for start, stop in self.rows)


class LoadedAdapter(NamedTuple):
    """An adapter of a folder. `digest` identifies the content of its files."""

    digest: str
    weights: AdapterWeights
    rank: int  # the highest


class ModelTargets:
    """Linear layers of attention and feed-forward that an adapter may change, in a model or in a rank's part of it."""

    def __init__(
        self,
        spec: DecoderSpec,
        back_end: BackEnd,
        dtype: DType,
        shard: Shard,
        summed_inputs: Mapping[str, Range],
    ) -> None:
        self._prefixes = sorted({*spec.weights.prefixes, *_TEXT_MODEL}, key=len, reverse=True)
        self._targets = dict(_targets(spec, shard, summed_inputs))
        self._back_end, self._dtype = back_end, MODEL_DTYPES[dtype_name(dtype)]

    def max_bytes(self, max_rank: int) -> int:
        """Return the most bytes of a file of weights, with every module in float32 at the highest rank."""
        return HEADER_BYTES + sum(4 * max_rank * (each.num_rows + each.width) for each in self._targets.values())

    def factor_sizes(self) -> dict[str, FactorSizes]:
        """Return the sizes of the factors that each linear op may have."""
        sizes: dict[str, FactorSizes] = {}
        for target in sorted(self._targets.values(), key=lambda each: each.first):
            before = sizes[target.op].parts if target.op in sizes else ()
            parts = (*before, (target.first, target.num_outputs))
            sizes[target.op] = FactorSizes(target.inputs[1] - target.inputs[0], target.all_rows, parts)
        return sizes

    def read(self, folder: Path, max_rank: int) -> LoadedAdapter:
        """Read and pack the adapter of a folder. ModelError names the file, the tensor and the limit."""
        config_content = read_bytes(folder, CONFIG_FILE)
        config = parse_config(config_content, folder / CONFIG_FILE)
        content = _read_weights(folder, self.max_bytes(max_rank))
        digest = hashlib.sha256(hashlib.sha256(config_content).digest() + hashlib.sha256(content).digest()).hexdigest()
        path = folder / WEIGHTS_FILE
        factors = self._factors(_tensors(content, path), path)
        del content
        scaled: dict[AdapterTarget, tuple[Array, Array]] = {}
        highest = 0
        for module, (target, down, up) in factors.items():
            expected = config.factor_of(module)
            highest = max(highest, expected.rank)
            _check(path, module, target, down, up, expected, max_rank)
            with np.errstate(over="ignore", invalid="ignore"):
                factor = converted(converted(up, FLOAT32) * np.float32(expected.scale), self._dtype)
            if target.grouped is not None:
                factor = factor[ungrouped(target.grouped)]
            scaled[target] = converted(down, self._dtype), factor
            for name, array in (("A", scaled[target][0]), ("B", factor)):
                if not all_finite(array):
                    dtype = dtype_name(self._dtype)
                    raise ModelError(f"{path}: lora_{name} of {module} has values that are not finite in {dtype}")
        return LoadedAdapter(digest, self._pack(scaled), highest)

    def _factors(self, tensors: Mapping[str, Array], path: Path) -> dict[str, tuple[AdapterTarget, Array, Array]]:
        """Return target, A and B by the modules' names."""
        halves: dict[str, dict[str, Array]] = {}
        for name, tensor in sorted(tensors.items()):
            match = _FACTOR.fullmatch(name)
            if match is None:
                refused = next((why for part, why in _REFUSED.items() if part in name), "no factor of a LoRA")
                raise ModelError(f"{path}: tensor {name!r:.300} is not supported: {refused}")
            halves.setdefault(match[1], {})[match[2]] = tensor
        if not halves:
            raise ModelError(f"{path}: no tensors")
        found: dict[str, tuple[AdapterTarget, Array, Array]] = {}
        named: dict[AdapterTarget, str] = {}
        for module, pair in halves.items():
            target = self._target(module)
            if target is None:
                served = ", ".join(sorted({name.rpartition(".")[2] for name in self._targets}))
                raise ModelError(f"{path}: the model has no target module {module!r:.300}; of its layers: {served}")
            if pair.keys() != {"A", "B"}:
                raise ModelError(f"{path}: lora_A or lora_B of {module} is missing")
            if named.setdefault(target, module) != module:
                raise ModelError(f"{path}: {named[target]!r:.300} and {module!r:.300} are the same module of the model")
            found[module] = target, pair["A"], pair["B"]
        return found

    def _target(self, module: str) -> AdapterTarget | None:
        """Return the target of a module named as in the model, or as in its text model alone."""
        for prefix in self._prefixes:
            if module.startswith(prefix) and (target := self._targets.get(module[len(prefix) :])) is not None:
                return target
        return None

    def _pack(self, scaled: Mapping[AdapterTarget, tuple[Array, Array]]) -> AdapterWeights:
        library, (make_down, make_up) = self._back_end.library, _makers(self._back_end)
        by_op: dict[str, list[AdapterTarget]] = {}
        for target in sorted(scaled, key=lambda each: (each.op, each.first)):
            by_op.setdefault(target.op, []).append(target)
        layers, num_bytes = {}, 0
        for op, targets in by_op.items():
            parts, rank = [], 0
            for target in targets:
                up = scaled[target][1]
                own = concatenated([up[slice(*rows)] for rows in target.rows])
                own = own if target.gated_head_dim is None else own[gates_last(len(own), target.gated_head_dim)]
                made = make_up(library.tensor(own))
                parts.append(LowRankPart(made, rank, up.shape[1], target.first, target.num_outputs))
                rank += up.shape[1]
            downs = [scaled[target][0][:, slice(*target.inputs)].copy() for target in targets]
            down = make_down(library.weight(LinearWeight.dense(downs), "cpu"))
            layers[op] = LowRankLayer(down, rank, targets[0].all_rows, tuple(parts))
            num_bytes += down.num_bytes + sum(part.up.num_bytes for part in parts)
        return AdapterWeights(layers, num_bytes)


def _targets(spec: DecoderSpec, shard: Shard, summed_inputs: Mapping[str, Range]) -> list[tuple[str, AdapterTarget]]:
    """Return the modules by name; `summed_inputs`: this rank's inputs of the ops that have some, by the ops' names."""
    found = []
    for index, layer in enumerate(spec.layers):
        shapes, stem = LayerShapes.of(spec, layer), spec.weights.layer.format(layer=index)
        for name, shape in shapes.linears.items():  # adapters change no experts
            op, first = f"layers.{index}.{name}", 0
            ranges = shard.adapted_ranges(layer, name, shape)
            if op in summed_inputs:
                ranges = [(0, count) for count in shape.num_rows]
            elif name == "feed_forward_in" and (inner := summed_inputs.get(f"layers.{index}.feed_forward_out")):
                ranges = [inner] * len(shape.num_rows)
            inputs = summed_inputs.get(op, (0, shape.width))
            all_rows, grouped = sum(stop - start for start, stop in ranges), shape if shape.num_groups > 1 else None
            left = iter(ranges)
            for module, counts in shape.module_rows:
                count, rows = sum(counts), tuple(shifted(list(islice(left, len(counts))), counts))
                is_gated = shape.num_gated_heads > 0 and module == shape.modules[0]
                head_dim = count // (2 * shape.num_gated_heads) if is_gated else None
                target = AdapterTarget(op, first, rows, all_rows, count, shape.width, inputs, grouped, head_dim)
                found.append((stem + module, target))
                first += target.num_outputs
    return found


def _read_weights(folder: Path, max_bytes: int) -> bytes:
    """Return the whole file, which cannot change any more once it is checked."""
    if not (folder / WEIGHTS_FILE).exists():
        raise ModelError(f"{folder}: no file {WEIGHTS_FILE}; other formats of weights are not read")
    path = file_inside(folder, WEIGHTS_FILE)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if len(content) > max_bytes:
        raise ModelError(f"{path}: larger than {max_bytes} bytes, which is all modules in float32 at the highest rank")
    return content


def _tensors(content: bytes, path: Path) -> dict[str, Array]:
    """Return the tensors of a file. ModelError for one that is not whole, or has tensors of unknown dtypes."""
    try:
        entries = deserialize(content)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        raise ModelError(f"{path}: not a whole safetensors file: {error}") from error
    found = dict[str, Array]()
    for name, entry in entries:
        if entry["dtype"] not in STORED_DTYPES:
            raise ModelError(f"{path}: tensor {name!r:.300} has dtype {entry['dtype']}, expected F32, F16 or BF16")
        found[name] = np.frombuffer(entry["data"], np.uint8).view(STORED_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def _check(
    path: Path, module: str, target: AdapterTarget, down: Array, up: Array, factor: Factor, max_rank: int
) -> None:
    for name, array in (("A", down), ("B", up)):
        if array.dtype not in FLOATS:
            dtype = dtype_name(array.dtype)
            raise ModelError(f"{path}: lora_{name} of {module} has dtype {dtype}, expected F32, F16 or BF16")
    if factor.rank > max_rank:
        raise ModelError(f"{path}: {module} has rank {factor.rank}, which is greater than max_lora_rank {max_rank}")
    for name, array, expected in (
        ("A", down, (factor.rank, target.width)), ("B", up, (target.num_rows, factor.rank))
    ):  # fmt: skip
        if array.shape != expected:
            raise ModelError(
                f"{path}: lora_{name} of {module} has shape {list(array.shape)}, expected {list(expected)} of rank "
                f"{factor.rank} in {CONFIG_FILE}"
            )


def _makers(back_end: BackEnd) -> tuple[Callable[..., Linear], Callable[..., Up]]:
    """Return the back end's makers of A and B; of C++ with memory of its own, which is freed with the adapter."""
    if back_end.name != "cpp":
        return back_end.linear, back_end.low_rank_up
    from quire.kernels.cpp.cpp_packing import PackedMemory  # noqa: PLC0415 (of the C++ back end alone)

    memory = PackedMemory()
    return partial(back_end.linear, memory=memory), partial(back_end.low_rank_up, memory=memory)
