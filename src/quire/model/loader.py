"""From a folder to a `Decoder` that is ready to run."""

from collections.abc import Mapping
from pathlib import Path

import torch

from quire.core.errors import ConfigError
from quire.kernels.back_end import BackEnd
from quire.model.checkpoint import Checkpoint
from quire.model.config import read_config, spec_from_config
from quire.model.config_reader import CONFIG_FILE, ConfigReader
from quire.model.decoder import Decoder
from quire.model.weights import WeightReader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    folder: Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    back_end: BackEnd,
    max_positions: int | None = None,
) -> Decoder:
    """Load the model in `folder` onto `device`.

    dtype: auto (as the config says), float32, bfloat16 or float16. `max_positions`: positions that will be used, at
    most the model's own, which is the default; rotary tables are made that long. Raises ModelError for a folder that
    cannot be loaded, ConfigError for an unknown dtype.
    """
    source = str(folder / CONFIG_FILE)
    config = read_config(folder)
    spec = spec_from_config(config, source)
    weights = WeightReader(
        Checkpoint(folder), spec.weights, back_end, _dtype(dtype, config, source), torch.device(device)
    )
    longest = spec.max_position_embeddings
    decoder = Decoder(spec, weights, longest if max_positions is None else min(max_positions, longest))
    weights.warn_of_unread()
    return decoder


def _dtype(name: str, config: Mapping[str, object], source: str) -> torch.dtype:
    """The dtype asked for, or the checkpoint's own, whose key older files spell torch_dtype; else float32."""
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
        return DTYPES[name]
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    return ConfigReader(config, source).choice(key, DTYPES, default="float32")
