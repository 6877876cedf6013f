"""Throughput of embeddings beside transformers: 512 texts of mixed lengths, the same model, threads and dtype.

    python bench/embeddings.py [--model FOLDER] [--dtype float32] [--texts 512] [--turns 3] [--threads N]
        [--openvino EXPORTED]

Without a folder, a random model of Qwen3-Embedding-0.6B's width with fewer layers is written first, so no download is
needed. The other sides get their texts sorted by length, in batches of --batch with padding, which is the best that
they can do; all sides get token ids. OpenVINO takes part with what `optimum-cli export openvino --task
feature-extraction` has made of the folder. Turns alternate; the median of each side is printed with its spread, and how
far its vectors are from Quire's.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config

from quire import LLM
from quire.extension.isas import set_threads_of_kernels, threads_of_kernels

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32_000, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": True, "rope_theta": 1e6,
}  # fmt: skip
Vectors = NDArray[np.float32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--openvino", type=Path, help="folder of the exported model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=threads_of_kernels())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    set_threads_of_kernels(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or write_model(Path(scratch))
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        prompts = make_prompts(options.texts, options.longest, vocab_size)
        num_tokens = sum(map(len, prompts))
        sides: dict[str, Callable[[], Vectors]] = {
            "quire": quire_side(folder, options.dtype, prompts),
            "transformers": transformers_side(folder, options.dtype, prompts, options.batch),
        }
        if options.openvino is not None:
            sides["openvino"] = openvino_side(options.openvino, options.dtype, prompts, options.batch, options.threads)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        vectors: dict[str, Vectors] = {}
        for _ in range(options.turns):
            for name, embed in sides.items():
                started = time.perf_counter()
                vectors[name] = embed()
                seconds[name].append(time.perf_counter() - started)
        print(f"{options.texts} texts, {num_tokens} tokens, {options.dtype}, {options.threads} threads")
        for name, taken in seconds.items():
            apart = np.abs(vectors[name] - vectors["quire"]).max()
            median = statistics.median(taken)
            print(f"{name:12} {options.texts / median:8.1f} texts/s {num_tokens / median:10.0f} tokens/s, "
                  f"median {median:6.2f} s of {min(taken):6.2f} to {max(taken):6.2f} s, vectors apart {apart:.1e}")


def write_model(folder: Path) -> Path:
    """Write a model with random weights that transformers and Quire read alike."""
    torch.manual_seed(0)
    known = {name: value for name, value in CONFIG.items() if name != "architectures"}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**known), dtype=torch.float32)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float32"}))
    return folder


def make_prompts(num: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Return token ids with lengths spread evenly over octaves, as passages and questions are mixed."""
    rng = random.Random(0)
    lengths = [int(8 * (longest / 8) ** rng.random()) for _ in range(num)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def quire_side(folder: Path, dtype: str, prompts: list[list[int]]) -> Callable[[], Vectors]:
    llm = LLM(folder, dtype=dtype, runner="pooling", enable_prefix_caching=False, max_model_len=4096)

    def embed() -> Vectors:
        return np.array([each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)], dtype=np.float32)

    return embed


def transformers_side(folder: Path, dtype: str, prompts: list[list[int]], batch: int) -> Callable[[], Vectors]:
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return lambda: padded(lambda ids, mask: model(ids, attention_mask=mask).last_hidden_state, prompts, batch)


def openvino_side(
    folder: Path, dtype: str, prompts: list[list[int]], batch: int, threads: int
) -> Callable[[], Vectors]:
    import openvino  # noqa: PLC0415 (no dependency of the project)

    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", settings)

    def states_of(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
        return torch.from_numpy(model({name: tensor.numpy() for name, tensor in given.items()})["last_hidden_state"])

    return lambda: padded(states_of, prompts, batch)


@torch.inference_mode()
def padded(
    states_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], prompts: list[list[int]], batch: int
) -> Vectors:
    """Return the normalized last states of prompts, in batches of similar lengths, padded behind."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: list[Vectors | None] = [None] * len(prompts)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        lengths = torch.tensor([len(prompts[index]) for index in part])
        ids = torch.zeros(len(part), int(lengths.max()), dtype=torch.int64)
        for row, index in enumerate(part):
            ids[row, : lengths[row]] = torch.tensor(prompts[index])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        last = states_of(ids, mask)[torch.arange(len(part)), lengths - 1].float()
        for index, vector in zip(part, torch.nn.functional.normalize(last, dim=1).numpy(), strict=True):
            found[index] = vector
    return np.array(found, dtype=np.float32)


if __name__ == "__main__":
    main()
