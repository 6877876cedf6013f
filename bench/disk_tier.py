"""Disk tier: a restart between two turns of a chat, its cost where nothing is found, and what saving holds up.

    python bench/disk_tier.py restart | unused | saving  [--num-tokens 8192]

The model has the shapes of Qwen2.5-0.5B and random weights (`bench/random_models.py`): times depend on shapes alone.
`restart`: turn 1 is computed and kept, the engine is closed and another one opened, turn 2 is turn 1, its answer and 64
tokens more; its time to first token with the folder and without it, and the bytes written over those of the blocks of
finished requests. `unused`: output tokens per second of requests that find nothing, with the tier and without, in
alternating rounds. `saving`: the longest time between two steps that the tier takes while turn 1 is saved.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from bench.random_models import QWEN2_5_0_5B

from quire import LLM, SamplingParams
from quire.engine.kv_disk import KVDisk
from quire.engine.offline_engine import LocalEngine

NUM_NEW = 64  # tokens of the second turn
app = typer.Typer(add_completion=False)
NumTokens = Annotated[int, typer.Option(help="tokens of the first turn's prompt")]


def open_llm(folder: Path, num_tokens: int, **settings: Any) -> LLM:  # noqa: ANN401
    """Return an engine for prompts of so many tokens."""
    return LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=num_tokens + 1024, max_num_seqs=16,
        num_kv_blocks=4 * (num_tokens + 1024) // 16, seed=0, **settings,
    )  # fmt: skip


def disk_of(llm: LLM) -> KVDisk:
    """Return the disk tier of an engine in this process."""
    assert isinstance(llm._open, LocalEngine), "in this process"
    disk = llm._open.assembled.engine.disk
    assert disk is not None, "with a disk tier"
    return disk


def tokens(count: int, seed: int) -> list[int]:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(100, 150_000, count).tolist()


def generate(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[list[int], int, float]:
    """Return the answer to a prompt, its cached tokens, and the seconds until it was there."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens, time.perf_counter() - started_s


@app.command()
def restart(num_tokens: NumTokens = 8192) -> None:
    """Measure the second turn of a chat after a restart."""
    with tempfile.TemporaryDirectory() as name:
        folder, kept = _model(Path(name)), Path(name, "kept")
        with open_llm(folder, num_tokens, kv_disk_dir=kept) as llm:
            prompt = tokens(num_tokens, 1)
            answer, _, first_s = generate(llm, prompt, 32)
            disk_of(llm).drain(60.0)
            stats, bytes_per_token = llm.kv_stats().disk, llm._open.ready.kv_bytes_per_token
            owed_bytes = (num_tokens + 31) // 16 * 16 * bytes_per_token
        second = prompt + answer + tokens(NUM_NEW, 2)
        opened_s = time.perf_counter()
        with open_llm(folder, num_tokens, kv_disk_dir=kept) as llm:
            opened_s = time.perf_counter() - opened_s
            generate(llm, tokens(32, 3), 1)
            loaded, num_found, loaded_s = generate(llm, second, 1)
            load_s = llm.kv_stats().disk["load_s"]
        plain_s = time.perf_counter()
        with open_llm(folder, num_tokens) as llm:
            plain_s = time.perf_counter() - plain_s
            generate(llm, tokens(32, 3), 1)
            computed, _, computed_s = generate(llm, second, 1)
    assert loaded == computed, "not the same token"
    print(f"first turn {first_s:.2f} s; second turn of {len(second)} tokens, {num_found} found")
    print(f"time to first token: computed {computed_s:.3f} s, loaded {loaded_s:.3f} s (reads {load_s:.3f} s): "
          f"{loaded_s / computed_s:.4f}")  # fmt: skip
    print(f"written {stats['written_bytes'] / 1e6:.1f} MB in {stats['write_s']:.2f} s, "
          f"{stats['written_bytes'] / owed_bytes:.3f} of the blocks; "
          f"start {opened_s:.2f} s, {plain_s:.2f} s without")  # fmt: skip


@app.command()
def unused(rounds: int = 5, num_requests: int = 8, max_tokens: int = 48) -> None:
    """Measure what the tier costs where nothing is found in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = _model(Path(name))
        ratios = list[float]()
        with open_llm(folder, 1024, kv_disk_dir=Path(name, "kept")) as kept, open_llm(folder, 1024) as plain:
            for number in range(rounds):
                seconds = dict[bool, float]()
                for is_kept in (True, False) if number % 2 else (False, True):
                    prompts = [{"prompt_token_ids": tokens(64, 1000 * number + each)} for each in range(num_requests)]
                    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
                    started_s = time.perf_counter()
                    (kept if is_kept else plain).generate(prompts, params, use_tqdm=False)
                    seconds[is_kept] = time.perf_counter() - started_s
                ratios.append(seconds[False] / seconds[True])
                print(f"round {number}: {num_requests * max_tokens / seconds[True]:.1f} tokens/s with, "
                      f"{num_requests * max_tokens / seconds[False]:.1f} without")  # fmt: skip
            written = kept.kv_stats().disk["written_bytes"]
    print(f"tokens/s with over without: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to "
          f"{max(ratios):.3f}; {written / 1e6:.1f} MB written")  # fmt: skip


@app.command()
def saving(num_tokens: NumTokens = 8192) -> None:
    """Measure the longest time that saving takes between two steps of another request."""
    with tempfile.TemporaryDirectory() as name:
        folder, taken = _model(Path(name)), list[float]()
        with open_llm(folder, num_tokens, kv_disk_dir=Path(name, "kept"), kv_disk_write_rate="4GiB") as llm:
            disk = disk_of(llm)
            generate(llm, tokens(num_tokens, 1), 1)
            step = disk.step

            def timed() -> None:
                started_s = time.perf_counter()
                step()
                taken.append(time.perf_counter() - started_s)

            disk.step = timed  # type: ignore[method-assign]
            generate(llm, tokens(16, 2), 400)
            disk.drain(60.0)
            written = llm.kv_stats().disk["written_bytes"]
    busy = sorted(each for each in taken if each > 1e-4)
    print(f"{written / 1e6:.1f} MB saved beside {len(taken)} steps: of {len(busy)} that saved, median "
          f"{statistics.median(busy) * 1e3:.2f} ms, p99 {busy[int(len(busy) * 0.99)] * 1e3:.2f} ms, "
          f"longest {busy[-1] * 1e3:.2f} ms")  # fmt: skip


def _model(parent: Path) -> Path:
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    return folder


if __name__ == "__main__":
    app()
