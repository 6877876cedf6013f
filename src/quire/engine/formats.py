"""Formats of models: the package that reads a model's files, imported for a model that needs it.

A model is a folder of floating-point weights, unless one of `FORMATS` recognizes it. Loads no torch. The imports inside
functions are for the start: most models need none of them, and a plan no tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quire.core.errors import ConfigError, ModelError
from quire.core.model_files import is_gguf, read_json_object
from quire.core.pooling import FoundPooler, Runner
from quire.formats import pooler
from quire.model.config_reader import CONFIG_FILE
from quire.model.source import ModelSource, is_quantized, read_folder
from quire.model.spec import DecoderSpec
from quire.text.text_settings import (
    TOKENIZER_FILE,
    missing_tokenizer,
    read_text_settings,
    tokenizer_file,
    warn_missing_tokenizer,
)

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

PUBLISHERS_CONFIG = "params.json"  # Mistral's and Meta's own


@dataclass(frozen=True, slots=True)
class Format:
    """A format of models besides folders of floats.

    read: from the path to the model's source. tokenizer_loader: as the function below; None where tokenizer files are
    those of any folder.
    """

    recognizes: Callable[[Path], bool]
    read: Callable[[Path], ModelSource]
    tokenizer_loader: Callable[[Path], "Callable[[], Tokenizer] | None"] | None = None


def read_source(path: Path, load_format: str = "auto", mmproj: str | None = None) -> ModelSource:
    """Read the config of the folder or file that `resolve_model` has found; its weights are as `load_format` says.

    mmproj: the file of an encoder of images beside a GGUF file. Raises ModelError for a folder or file that is no model
    of a known family, and names what is wrong; ConfigError for an encoder beside a folder.
    """
    if mmproj is not None:
        if not is_gguf(path):
            raise ConfigError(f"mmproj {mmproj!r} is for a model in a GGUF file; {path} has its own encoder, or none")
        from quire.formats.gguf.gguf_source import read_gguf  # noqa: PLC0415

        return read_gguf(path, Path(mmproj).expanduser())
    if load_format == "dummy":
        from quire.model.dummy_weights import read_dummy  # noqa: PLC0415

        return read_dummy(path)
    found = _format_of(path)
    return read_folder(path) if found is None else found.read(path)


def find_pooler(runner: Runner, path: Path, spec: DecoderSpec, overrides: str = "") -> FoundPooler:
    """Return the pooling of the model in a folder or file. `overrides`: keys of its config.json, as JSON.

    ModelError for a model that is not pooled here; where the model generates and `runner` does not ask for vectors,
    that is the reason for none. ConfigError for overrides that are not supported.
    """
    try:
        return pooler.find_pooler(runner, path, spec, overrides)
    except ModelError as error:
        if runner == "pooling" or not spec.generates:
            raise
        return FoundPooler(None, str(error))


TokenizerUse = Literal["required", "optional", "skipped"]


def load_tokenizer(path: Path, use: TokenizerUse = "optional") -> "Tokenizer | None":
    """Load the tokenizer of a folder or file, or warn and return None if it has none: the model takes token ids.

    Raises ModelError for one that is broken, for none where it is required.
    """
    load = None if use == "skipped" else tokenizer_loader(path)
    if load is None:
        if use == "required":
            if path.is_dir() and not any(path.glob("*.json")):
                raise ModelError(f"{path} is no folder of a model: no file config.json")
            raise ModelError(f"{missing_tokenizer(path)}. --skip-tokenizer-init serves token ids alone")
        if use == "skipped":
            return None
        warn_missing_tokenizer(path)
        return None
    return load()


def tokenizer_loader(path: Path) -> "Callable[[], Tokenizer] | None":
    """Return what loads the tokenizer of a folder or file, or None if it has none. Errors as in `load_tokenizer`."""
    for each in FORMATS:
        if each.tokenizer_loader is not None and each.recognizes(path):
            return each.tokenizer_loader(path)
    name = tokenizer_file(path)
    if name is None:
        return None
    return partial(_load_tokenizer, path, name)


def _load_tokenizer(path: Path, name: str) -> "Tokenizer":
    """Load the tokenizer of a folder from the file `name`."""
    from quire.text.tokenizer import Tokenizer  # noqa: PLC0415

    if name == TOKENIZER_FILE:
        return Tokenizer.from_folder(path)
    from quire.text.tokenizer_formats.folder_tokenizer import read_tokenizer  # noqa: PLC0415

    return Tokenizer.load(f"{path}/{name}", lambda: (read_tokenizer(path, name), read_text_settings(path)))


def _format_of(path: Path) -> Format | None:
    return next((each for each in FORMATS if each.recognizes(path)), None)


def _read_gguf(path: Path) -> ModelSource:
    from quire.formats.gguf.gguf_source import read_gguf  # noqa: PLC0415

    return read_gguf(path)


def _gguf_tokenizer_loader(path: Path) -> "Callable[[], Tokenizer] | None":
    from quire.formats.gguf.gguf_source import gguf_tokenizer_loader  # noqa: PLC0415

    return gguf_tokenizer_loader(path)


def _is_publishers(path: Path) -> bool:
    return (path / PUBLISHERS_CONFIG).is_file() and not (path / CONFIG_FILE).exists()


def _refuse_publishers(path: Path) -> ModelSource:
    """Raise ModelError for a folder with Mistral's or Meta's own names of tensors, those of an encoder among them."""
    raise ModelError(
        f"{path}: {PUBLISHERS_CONFIG} is of a model in its publisher's own form (consolidated weights): neither its "
        f"text model nor its encoder of images is read; Hugging Face's form of the model has a {CONFIG_FILE}"
    )


def _is_quantized_folder(path: Path) -> bool:
    return is_quantized(read_json_object(path, CONFIG_FILE))


def _read_quantized(path: Path) -> ModelSource:
    from quire.formats.quantized.quantized_weights import read_quantized  # noqa: PLC0415

    return read_quantized(path)


FORMATS = (
    Format(is_gguf, _read_gguf, _gguf_tokenizer_loader),
    Format(_is_publishers, _refuse_publishers),
    Format(_is_quantized_folder, _read_quantized),
)
