"""Values of vLLM's arguments, from texts of a command line, an environment or a file, and rows of their table."""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from quire.core.errors import ConfigError

Takes = Literal["switch", "number", "real", "text", "optional text", "list", "json"]
Does = Literal["same", "renamed", "accepted", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """An argument of vLLM: the flag `--its-name` of `serve`, and, of the engine, a keyword of `LLM` too.

    An option of Quire with the argument's own name takes it, whatever the row says. The `sentence` is a difference
    ("same", "renamed"), the reason that there is no effect ("accepted"), or that there is no support ("refused").
    """

    name: str
    takes: Takes = "text"
    allowed: tuple[Any, ...] = ()        # for a refused one: values without effect, beside those that are empty
    flags: tuple[str, ...] = ()          # beside the long one
    does: Does = "same"
    sentence: str = ""
    own: str = ""                        # option of Quire that it sets, where that has another name
    convert: Callable[[Any, str], Any] | None = None  # from a value, and the name for errors, to the own option's value
    spread: Callable[[Any, str], dict[str, Any]] | None = None  # the same, to the values of several own options
    is_engine: bool = True               # else of servers alone
    is_current: bool = True              # exists in vLLM 0.33, else in a version before

    @property
    def flag(self) -> str:
        """The long flag."""
        return "--" + self.name.replace("_", "-")


def switch(name: str, *flags: str, allowed: tuple[Any, ...] = (False,)) -> Row:
    """Return a row of a flag without a value, which has a `--no-` form."""
    return Row(name, "switch", allowed, flags)


def number(name: str, *allowed: int, flags: tuple[str, ...] = ()) -> Row:
    """Return a row of an integer, which may be written as 32k or 32K."""
    return Row(name, "number", allowed, flags)


def real(name: str, *allowed: float) -> Row:
    """Return a row of a number."""
    return Row(name, "real", allowed)


def text(name: str, *allowed: str, flags: tuple[str, ...] = ()) -> Row:
    """Return a row of a text."""
    return Row(name, "text", allowed, flags)


def texts(name: str) -> Row:
    """Return a row of one or several texts."""
    return Row(name, "list")


def config(name: str, *flags: str) -> Row:
    """Return a row of JSON, or of its keys one by one: `--name.key value`."""
    return Row(name, "json", (), flags)


def same(row: Row, sentence: str = "", convert: Callable[[Any, str], Any] | None = None) -> Row:
    """Return the row of an argument that Quire has under the same name."""
    return replace(row, does="same", sentence=sentence, convert=convert)


def renamed(row: Row, own: str, sentence: str = "", convert: Callable[[Any, str], Any] | None = None) -> Row:
    """Return the row of an argument that Quire has under another name."""
    return replace(row, does="renamed", own=own, sentence=sentence, convert=convert)


def accepted(sentence: str, *rows: Row) -> tuple[Row, ...]:
    """Return rows of arguments that have no effect."""
    return tuple(replace(row, does="accepted", sentence=sentence) for row in rows)


def refused(sentence: str, *rows: Row) -> tuple[Row, ...]:
    """Return rows of arguments that would change the engine or the server in ways that are not supported."""
    return tuple(replace(row, does="refused", sentence=sentence) for row in rows)


log = logging.getLogger("quire.vllm_arguments")

_SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_RUNNERS = {"auto": None, "none": None, "generate": "generate", "embed": "pooling", "embedding": "pooling",
            "score": "pooling"}
_ATTENTION = {"TRITON_ATTN": "auto"}  # Triton's on a GPU; on a CPU vLLM, too, has kernels of its own
_READ_FORMATS = ("hf", "safetensors", "gguf", "fastsafetensors", "runai_streamer")
_NO_GRAPHS = ("NONE", "none", 0)   # `cudagraph_mode`; None is the default
_DTYPES = {"half": "float16", "float": "float32"}
_MOST_GIB = 1024        # a number up to here is GiB, as in vLLM; no swap space has so few bytes


def parsed(row: Row, given: object, shown: str) -> Any:  # noqa: ANN401 (of any argument)
    """Return the value that a text stands for, or any other object as it is. ConfigError names `shown`."""
    if not isinstance(given, str) or row.takes in {"text", "optional text", "list"}:
        return given
    if row.takes == "switch":
        if given.lower() not in _SWITCHES:
            raise ConfigError(f"{shown} must be true or false, got {given!r}")
        return _SWITCHES[given.lower()]
    if given in {"", "None"}:
        return None
    if row.takes == "json":
        return parsed_json(given, shown)
    return whole_number(given, shown) if row.takes == "number" else _real(given, shown)


def parsed_json(given: str, shown: str) -> Any:  # noqa: ANN401 (JSON)
    """Return what a JSON text holds. A text that is none, such as the name of a mode, remains as it is."""
    try:
        return json.loads(given)
    except ValueError as error:
        if given.lstrip().startswith(("{", "[")):
            raise ConfigError(f"{shown} must be JSON: {error}") from None
        return given


def whole_number(given: object, shown: str) -> Any:  # noqa: ANN401 (an int, or an object that is checked elsewhere)
    """Return an integer from a text such as 4096, 32k (32,000), 25.6k or 32K (32,768)."""
    if not isinstance(given, str):
        return given
    match = re.fullmatch(r"\s*(-?\d{1,18})(\.\d{1,18})?([kmgtKMGT])?\s*", given)
    if match is None or (match[2] and (match[3] or "K").isupper()):
        raise ConfigError(f"{shown} must be an integer such as 4096, 32k or 32K, got {given!r}")
    return round(float(match[1] + match[2]) * _MULTIPLIERS[match[3]]) if match[2] else _whole(match)


def _whole(match: re.Match[str]) -> int:
    return int(match[1]) * _MULTIPLIERS.get(match[3], 1)


def _real(given: str, shown: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise ConfigError(f"{shown} must be a number, got {given!r}") from None


# --- values of options that Quire has, in vLLM's forms ---------------------------------------------------------------


def grammar_option(name: str) -> Callable[[Any, str], dict[str, bool] | None]:
    """Return the conversion of a switch to the keys that it sets in `structured_outputs_config`."""

    def convert(given: object, shown: str) -> dict[str, bool] | None:
        return {name: True} if _is_on(given, shown) else None

    return convert


def _is_on(given: object, shown: str) -> bool:
    is_on = _SWITCHES.get(given.lower()) if isinstance(given, str) else given
    if not isinstance(is_on, bool):
        raise ConfigError(f"{shown} must be true or false, got {given!r}")
    return is_on


def level_name(given: object, _shown: str) -> object:
    """Return the level of a log, which vLLM's may have in capitals."""
    name = given.lower() if isinstance(given, str) else given
    return "warning" if name == "warn" else name


def share_if(given: object, shown: str) -> float:
    """Return the share of requests that are logged by a switch."""
    return float(_is_on(given, shown))


def share_unless(given: object, shown: str) -> float:
    """Return the share of requests that are logged by a switch which turns that off."""
    return 1.0 - share_if(given, shown)


def max_images_of(given: object, shown: str) -> int | None:
    """Return the images of a request by limits that are numbers, or objects with a `count`; None: none is given."""
    limits = parsed_json(given, shown) if isinstance(given, str) else given
    if not isinstance(limits, Mapping):
        raise ConfigError(f"{shown} must be a JSON object such as {{\"image\": 8}}, got {given!r}")
    count = limits.get("image")
    count = count.get("count") if isinstance(count, Mapping) else count
    if count is not None and (type(count) is not int or count < 0):
        raise ConfigError(f"{shown} must have an image that is an integer of at least 0, got {count!r}")
    return count


def profile_dir_of(given: object, shown: str) -> str | None:
    """Return the folder of profiles of a `profiler_config`. ConfigError for one without a folder."""
    settings = parsed_json(given, shown) if isinstance(given, str) else given
    if not settings:
        return None
    folder = settings.get("torch_profiler_dir") if isinstance(settings, Mapping) else None
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"{shown} must have torch_profiler_dir, the folder of profiles, got {given!r}")
    return folder


_ROLES = {"kv_producer": "producer", "kv_consumer": "consumer", "kv_both": "both"}


def transfer_options(given: object, shown: str) -> dict[str, Any]:
    """Return the options of prefill apart from decoding that a `kv_transfer_config` has. ConfigError for others."""
    settings = parsed_json(given, shown) if isinstance(given, str) else given
    if not settings:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{shown} must be an object, got {given!r}")
    connector, role = settings.get("kv_connector"), settings.get("kv_role")
    if connector != "NixlConnector":
        raise ConfigError(
            f"{shown} has kv_connector {connector!r}: NixlConnector alone has a counterpart, kv_role and kv_peers; "
            "blocks are kept on a disk by kv_disk_dir and kv_disk_size"
        )
    if role not in _ROLES:
        raise ConfigError(f"{shown} must have kv_role {', '.join(_ROLES)}, got {role!r}")
    if settings.get("kv_load_failure_policy", "recompute") != "recompute":
        raise ConfigError(
            f"{shown} has kv_load_failure_policy {settings['kv_load_failure_policy']!r}: what cannot be fetched is "
            "always computed (recompute)"
        )
    extra = settings.get("kv_connector_extra_config") or {}
    names = {"kv_port": "kv_port", "kv_ip": "kv_host", "engine_id": "kv_engine_id"}
    options = {own: settings[name] for name, own in names.items() if settings.get(name) is not None}
    if isinstance(extra, Mapping) and extra.get("kv_lease_duration") is not None:
        options["kv_lease_duration"] = extra["kv_lease_duration"]
    if role == "kv_consumer":
        options = {}    # settings of the end that listens
    return options | {"kv_role": _ROLES[role]}


def graph_options(given: object, shown: str) -> dict[str, Any]:
    """Return the options of CUDA graphs that a `compilation_config` has."""
    if not isinstance(given, Mapping):
        return {}
    options: dict[str, Any] = {}
    if given.get("cudagraph_capture_sizes"):
        options["cudagraph_capture_sizes"] = _sizes(given["cudagraph_capture_sizes"], shown)
    if given.get("max_cudagraph_capture_size") is not None:
        options["max_cudagraph_capture_size"] = whole_number(given["max_cudagraph_capture_size"], shown)
    if given.get("cudagraph_mode", "") in _NO_GRAPHS:
        options["enforce_eager"] = True
    return options


def older_graph_sizes(given: object, shown: str) -> dict[str, Any]:
    """Return the options for `cuda_graph_sizes`: one number is the largest size, several are all of them."""
    sizes = _sizes(given, shown)
    return {"max_cudagraph_capture_size": sizes[0]} if len(sizes) == 1 else {"cudagraph_capture_sizes": sizes}


def _sizes(given: object, shown: str) -> tuple[Any, ...]:
    return tuple(whole_number(each, shown) for each in (given if isinstance(given, list | tuple) else [given]))


def json_text(given: object, _shown: str) -> str:
    """Return JSON as a text, which may be given as an object."""
    return given if isinstance(given, str) else json.dumps(given)


def kv_events_json(given: object, shown: str) -> str:
    """Return a `kv_events_config` as a text, with the form of hashes that a variable of vLLM's sets."""
    settings = parsed_json(given, shown) if isinstance(given, str) else given
    is_int = os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES")
    if is_int is None or not isinstance(settings, Mapping):
        return json_text(given, shown)
    return json.dumps({"use_int_block_hashes": is_int.strip() != "0"} | dict(settings))


def length(given: object, shown: str) -> Any:  # noqa: ANN401 (as `whole_number`)
    """Return a context length; None, the engine's choice, for -1 and auto."""
    if given == -1 or (isinstance(given, str) and given.strip().lower() in {"-1", "auto"}):
        return None
    return whole_number(given, shown)


def dtype_of(given: object, _shown: str) -> str:
    """Return the name of a dtype, of torch.dtype too."""
    name = str(given).removeprefix("torch.")
    return _DTYPES.get(name, name)


def kv_dtype_of(given: object, shown: str) -> str:
    """Return the name of a KV cache's dtype; that of vLLM's latents in 656 bytes stores them alike here."""
    name = dtype_of(given, shown)
    return {"fp8_e4m3": "fp8", "fp8_ds_mla": "fp8_per_token_head"}.get(name, name)


def attention_backend_of(given: object, shown: str) -> object:
    """Return an attention back end; for a name of vLLM's without a counterpart, log that and return None, the default.

    Quire's names are in lower case, vLLM's in upper case.
    """
    name = getattr(given, "name", given)  # vLLM has an enumeration, too
    if not isinstance(name, str) or name != name.upper():
        return given
    if name == "FLASHINFER" and find_spec("flashinfer") is not None:
        return "flashinfer"
    if name not in _ATTENTION:
        log.info("%s has no effect: %s is no attention back end of this installation", shown, name)
    return _ATTENTION.get(name)


def swap_bytes(given: object, _shown: str) -> object:
    """Return a size in which a number without a unit is GiB up to 1024, and bytes above."""
    try:
        count = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return given
    return f"{count:.15g}GiB" if 0 < count <= _MOST_GIB else given


def model_impl_of(given: object, shown: str) -> Any:  # noqa: ANN401 (checked as an option's value)
    """Return the implementation of a model of vLLM's: its own is Quire's."""
    return "quire" if given == "vllm" else given


def load_format_of(given: object, shown: str) -> Any:  # noqa: ANN401 (checked as an option's value)
    """Return how weights are loaded; a format of vLLM's that is read is `auto`. ConfigError for another one."""
    if isinstance(given, str) and given not in (*_READ_FORMATS, "auto", "dummy"):
        raise ConfigError(
            f"{shown} {given!r} is not supported: weights are read from safetensors or GGUF files, as the model has "
            "them"
        )
    return "auto" if given in _READ_FORMATS else given


def runner_of(given: object, shown: str) -> Any:  # noqa: ANN401 (a runner, or None for the default)
    """Return the runner that serves a task, or a conversion of a model, of vLLM's. ConfigError for one without any."""
    if given not in _RUNNERS:
        raise ConfigError(f"{shown} {given} is not supported: it must be one of {', '.join(_RUNNERS)}")
    return _RUNNERS[str(given)]
