"""`quire pack`: a model's weights, as an engine on a CPU has them in memory, into a file for its next starts."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from quire.cli.flag_groups import flag, with_config_file, with_flag_groups
from quire.core.errors import ConfigError
from quire.core.options import same_option
from quire.core.pooling import Runner
from quire.engine.options import EngineOptions
from quire.engine.options.model import Dtype
from quire.model.quantization import Activations, Method


@dataclass(frozen=True, slots=True)
class PackOptions:
    """Settings of an engine that decide how weights are packed."""

    model: str | None = same_option(EngineOptions, "model")
    revision: str | None = same_option(EngineOptions, "revision")
    dtype: Dtype = same_option(EngineOptions, "dtype")
    quantization: Method | None = same_option(EngineOptions, "quantization")
    quantization_group_size: int = same_option(EngineOptions, "quantization_group_size")
    quantization_activations: Activations | None = same_option(EngineOptions, "quantization_activations")
    runner: Runner = same_option(EngineOptions, "runner")
    hf_overrides: str = same_option(EngineOptions, "hf_overrides")


@with_config_file
@with_flag_groups
def pack(
    options: PackOptions,
    output: Annotated[
        Path,
        flag("file to write, NAME.quire, or a folder, where its name is the model's", "--output", "-o", metavar="FILE"),
    ],
) -> None:
    """Pack a model's weights into a file, from which engines on CPUs start sooner.

    Engines use it with --packed-weights FILE and the same settings. A file that fits already is left as it is.
    """
    from quire.engine.loading import load  # noqa: PLC0415 (for commands that load a model)
    from quire.extension.isas import usable_isas  # noqa: PLC0415
    from quire.model.resolve import resolve_model  # noqa: PLC0415

    if not usable_isas():
        raise ConfigError("quire pack needs the compiled C++ extension")
    engine = EngineOptions(**asdict(options), packed_weights=str(output), device="cpu")
    loaded = load(engine, resolve_model(engine.model, engine.model_files, engine.revision), must_write=True)
    print(f"{output}: {loaded.model.num_parameters} parameters, {loaded.model.weight_bytes} bytes of weights")  # noqa: T201
