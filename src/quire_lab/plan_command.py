"""`quire plan`: memory of a device, from config.json and safetensors headers alone."""

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from quire.cache.states import most_sequences
from quire.cli.flag_groups import JSON, flag_field, with_config_file, with_flag_groups
from quire.core.host_limits import format_bytes, free_memory_bytes
from quire.core.options import SIZE, parse_bytes
from quire.engine.formats import find_pooler
from quire.engine.options import EngineOptions
from quire.model.quantization import CHECKPOINT_METHODS
from quire_lab.bench import report
from quire_lab.sim.hardware import (
    CONTIGUOUS_ATTENTION_FACTOR,
    PAGED_ATTENTION_FACTOR,
    CostModel,
    Hardware,
    exchange_mode,
    read_hardware,
)
from quire_lab.sim.models import FoundModel, read_draft_model, read_model
from quire_lab.sim.planning import (
    CONTEXT_LEN,
    MemoryPlan,
    TargetPrice,
    not_servable_yet,
    plan_memory,
    stored_parameters,
    target_prices,
)

_NUMS_DECODES = (1, 8, 64)  # beside which a target of time has its price
_device = partial(flag_field, panel="Device")


@dataclass(frozen=True, slots=True)
class DeviceFlags:
    """Device that the model is planned for."""

    hardware: str | None = _device(
        None, "A100-40GB, A100-80GB, H100, H200, or a file of `quire bench calibrate`", metavar="NAME|FILE",
        show_default="this machine",
        row="`A100-40GB`, `A100-80GB`, `H100`, `H200`, or a JSON file, of `quire bench calibrate` or your own; "
        "`quire plan` without it plans for this machine's free memory",
    )  # fmt: skip
    device_memory: str | None = _device(
        None, "bytes of one device; 24GiB", metavar=SIZE, show_default="the hardware's, or what is free",
        row="bytes of one device; `24GiB`",
    )  # fmt: skip

    @property
    def machine(self) -> Hardware:
        """The device with the memory asked for."""
        memory_bytes = None if self.device_memory is None else parse_bytes(self.device_memory, "device_memory")
        if self.hardware is None:
            return Hardware("this machine", memory_bytes or free_memory_bytes(), 1.0, 1.0, device="cpu")
        return read_hardware(self.hardware, memory_bytes)

    def plan(self, model: FoundModel, engine: EngineOptions) -> MemoryPlan:
        """Return the plan. Raises ConfigError for a model that does not fit."""
        draft = read_draft_model(model, engine)
        return plan_memory(model, self.machine, engine, engine.tensor_parallel_size, draft)

    def cost(self, model: FoundModel, engine: EngineOptions, found: MemoryPlan) -> CostModel:
        """Return the time of the model's steps on the device, which must be named."""
        hardware = self.machine
        return CostModel(
            model.spec,
            hardware,
            found.cache.block_size,
            found.num_devices,
            found.dtype,
            CONTIGUOUS_ATTENTION_FACTOR if hardware.curve else PAGED_ATTENTION_FACTOR,  # a curve has its attention, too
            found.kv_cache_dtype,
            model.quantization,
            exchange_mode(engine.tensor_parallel_mode_on(hardware.device), hardware.device),
        )

    def prices(self, model: FoundModel, engine: EngineOptions, found: MemoryPlan) -> list[TargetPrice]:
        """Return what the target for the time of steps costs long prompts; nothing without a target or a device."""
        if self.hardware is None or found.scheduler.itl_target_s == math.inf:
            return []
        nums = sorted({min(num, found.scheduler.max_num_seqs) for num in _NUMS_DECODES})
        context_len = min(CONTEXT_LEN, found.scheduler.max_model_len)
        return target_prices(self.cost(model, engine, found).step_s, found.scheduler.itl_target_s, nums, context_len)

    def not_servable_yet(self, model: FoundModel, engine: EngineOptions) -> list[str]:
        """Return the reasons for which the engine would refuse to serve this."""
        return not_servable_yet(model, self.machine, engine, engine.tensor_parallel_size)


def memory_plan(engine: EngineOptions) -> MemoryPlan:
    """Return the plan of a model on this machine. Errors are those of `read_model` and `plan_memory`."""
    model = read_model(engine.model, engine.dtype, engine.quantization_options, engine.mmproj)
    return DeviceFlags().plan(model, engine)


@with_config_file
@with_flag_groups
def plan(
    engine: EngineOptions,
    device: DeviceFlags,
    json: Annotated[Path | None, JSON] = None,
) -> None:
    """Say what fits before anything is loaded: weights, KV blocks, requests by length, and what binds."""
    model = read_model(engine.model, engine.dtype, engine.quantization_options, engine.mmproj)
    found, refusals = device.plan(model, engine), device.not_servable_yet(model, engine)
    is_packed = model.quantization.method in CHECKPOINT_METHODS  # elements of its files are no parameters
    num_stored = 0 if model.folder is None or is_packed else stored_parameters(model.folder, engine.mmproj)
    pooling, prices = _pooling(model, engine), device.prices(model, engine, found)
    rows = _rows(found) | price_row(prices, found) | pooling
    report.print_rows(f"{found.model} on {found.num_devices} x {found.hardware}", rows)
    if num_stored not in (0, found.num_parameters):
        report.print_line(f"the files hold {num_stored:,} parameters, config.json describes {found.num_parameters:,}")
    print_refusals(refusals)
    derived = {
        "kv_cache_bytes": found.kv_cache_bytes, "stored_parameters": num_stored, "not_servable_yet": refusals,
        "pooling": pooling.get("pooling"), "itl_target_prices": [price._asdict() for price in prices],
    }  # fmt: skip
    report.write_json(json, asdict(found) | derived)


def _pooling(model: FoundModel, engine: EngineOptions) -> dict[str, str]:
    """Return the row of the pooling of a model that gives vectors."""
    if model.folder is None:
        return {}
    config = find_pooler(engine.runner, model.folder, model.spec, engine.hf_overrides).config
    return {} if config is None else {"pooling": str(config)}


def _exchanges(found: MemoryPlan) -> str:
    number, num_bytes = found.exchanges
    return f"{number} in a step; a rank gets {num_bytes:,} bytes in one of 1 token"


def _images(found: MemoryPlan) -> str:
    kv_bytes = format_bytes(found.image_tokens * found.kv_bytes_per_token)
    which = f"of {found.image_size} pixels" if found.image_size else "each"
    encoded = format_bytes(found.image_bytes)
    return (
        f"{found.image_tokens:,} tokens {which}: {kv_bytes} of the KV cache, {encoded} encoded; "
        f"the encoder has {format_bytes(found.vision_weight_bytes)} of the weights, and takes up to "
        f"{format_bytes(found.encoding_bytes)} for an image of {found.most_image_tokens:,} tokens; "
        f"up to {format_bytes(found.pixel_bytes)} of pixels are kept"
    )


def price_row(prices: list[TargetPrice], found: MemoryPlan) -> dict[str, str]:
    """Return the row of the price of a target of time, if there is one."""
    name = f"steps of {found.scheduler.itl_target_s * 1e3:g} ms"
    return {name: "time of long prompts " + ", ".join(map(str, prices))} if prices else {}


def print_refusals(refusals: list[str]) -> None:
    """Print a line for each reason why the engine would refuse to serve this."""
    for reason in refusals:
        report.print_line(f"not servable yet: {reason}")


def _tails(found: MemoryPlan) -> str:
    """Return what blocks keep for short convolutions."""
    return (
        f"{format_bytes(found.tail_bytes)} of each block, for {found.num_convolutions} layers: prefixes are found at "
        "the end of each block"
    )


def _states(found: MemoryPlan) -> str:
    """Return what slots for states there are."""
    slots = found.cache.num_state_slots
    return (
        f"{slots:,} slots of {format_bytes(found.slot_bytes)}, {format_bytes(found.state_bytes)}: at most "
        f"{most_sequences(slots):,} sequences at once; snapshots in the rest"
    )


def _rows(found: MemoryPlan) -> dict[str, Any]:
    cache, each = found.cache, " each" if found.num_devices > 1 else ""
    held = f"{cache.num_blocks:,} blocks of {cache.block_size}: {cache.num_blocks * cache.block_size:,} tokens"
    kv_cache = "none: the model keeps no keys and values"
    if cache.num_blocks:
        kv_cache = f"{held}, {format_bytes(found.kv_cache_bytes)}{each}"
    engines = {"engines": f"{found.num_engines}, each with what follows"} if found.num_engines > 1 else {}
    return {
        "memory": format_bytes(found.memory_bytes) + each,
        **engines,
        **({"ranks": f"{found.num_ranks}, which hold together what follows"} if found.num_ranks > 1 else {}),
        "weights": f"{format_bytes(found.weight_bytes)}{each}, {found.num_parameters:,} parameters of {found.dtype}",
        **({"of which a token reads": format_bytes(found.token_weight_bytes)} if found.has_experts else {}),
        **({found.draft_name: f"{format_bytes(found.draft_weight_bytes)} of weights"} if found.draft_name else {}),
        **({"quantization": found.quantization} if found.quantization else {}),
        "workspaces": (
            f"up to {format_bytes(found.workspace_bytes)}{each}; block tables {format_bytes(found.table_bytes)}"
        ),
        "KV cache": kv_cache,
        "of each token": f"{format_bytes(found.kv_bytes_per_token)} in {found.kv_cache_dtype}",
        **({"short convolutions": _tails(found)} if found.num_convolutions else {}),
        **({"states": _states(found)} if found.slot_bytes else {}),
        **({"windows": found.windows} if found.windows else {}),
        **({"images": _images(found)} if found.image_tokens else {}),
        **({"exchanges": _exchanges(found)} if found.exchanges.number else {}),
        "longest request": f"{found.scheduler.max_model_len:,} tokens",
        "at once": ", ".join(f"{num:,} of {length:,}" for length, num in found.num_fitting.items()) + " tokens",
        "what binds": found.binds,
    }
