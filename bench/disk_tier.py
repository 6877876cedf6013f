"""Disk tier: a restart between two turns of a chat, its cost where nothing is found, and what saving holds up.

    python bench/disk_tier.py restart | unused | saving  [--num-tokens 8192]
    python bench/disk_tier.py slots GGUF LIBRARIES       # LIBRARIES: llama.cpp's, as bench/real.py has them
    python bench/disk_tier.py soak --minutes 20

The model has the shapes of Qwen2.5-0.5B and random weights (`bench/random_models.py`): times depend on shapes alone.
`restart`: turn 1 is computed and kept, the engine is closed and another one opened, turn 2 is turn 1, its answer and 64
tokens more; its time to first token with the folder and without it, and the bytes written over those of the blocks of
finished requests. `unused`: output tokens per second of requests that find nothing, with the tier and without, in
alternating rounds. `saving`: the longest time that the tier takes between two steps, and the longest step, while
prompts are saved and without, with what of it the thread had no core for or waited for a lock or a file. `slots`:
turn 2 after a restart, beside llama.cpp, which restores the state that it has saved of turn 1 and computes the rest, on
the same weights in Q8_0. `soak`: random prompts that have ten times the blocks of the cache on the disk, and saved
sessions; descriptors, memory and what is in use of it, and bytes on the disk as time goes by.
"""

import ctypes
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from quire import LLM, SamplingParams
from quire.engine.kv_disk import KVDisk
from quire.engine.offline_engine import LocalEngine
from random_models import QWEN2_5_0_5B

ROOT = Path(__file__).parents[1]
NUM_NEW = 64  # tokens of the second turn
NUM_ANSWERED = 32
Q8_0 = 7      # a llama_ftype
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
def saving(num_tokens: NumTokens = 8192, rounds: int = 4) -> None:
    """Measure what saving takes between two steps of another request, and how long its steps take beside a save."""
    with tempfile.TemporaryDirectory() as name:
        folder, gaps = _model(Path(name)), dict[bool, list[_Gap]]({True: [], False: []})
        steps = dict[bool, list[_Gap]]({True: [], False: []})
        with open_llm(folder, num_tokens, kv_disk_dir=Path(name, "kept"), kv_disk_write_rate="4GiB") as llm:
            disk, is_saving = disk_of(llm), False
            engine = llm._open.assembled.engine  # type: ignore[attr-defined]
            disk.step = _timed(disk.step, lambda: gaps[is_saving])  # type: ignore[method-assign]
            engine.executor.collect = _timed(engine.executor.collect, lambda: steps[is_saving])
            for number in range(2 * rounds):
                is_saving = number % 2 == 0
                if is_saving:
                    disk.step, step = lambda: None, disk.step  # type: ignore[method-assign]
                    generate(llm, tokens(num_tokens, 1 + number), 1)
                    disk.step = step  # type: ignore[method-assign]
                generate(llm, tokens(16, 100 + number), 200)
                disk.drain(60.0)
            written = llm.kv_stats().disk["written_bytes"]
    print(f"{written / 1e6:.1f} MB saved in {rounds} turns of 200 tokens, and as many turns without")
    for told, found in (("between two steps", gaps), ("steps", steps)):
        for is_saving, taken in found.items():
            worst = max(taken, key=lambda each: each.wall_s)
            locked = max(taken, key=lambda each: each.locked_s)
            wall_ms = sorted(each.wall_s * 1e3 for each in taken)
            print(f"{told}, {'saving' if is_saving else 'without'}: {len(taken)}, median "
                  f"{statistics.median(wall_ms):.2f} ms, p99 {wall_ms[int(len(wall_ms) * 0.99)]:.2f}, longest {worst}; "
                  f"most in locks and files {locked}; "
                  f"most CPU {max(each.cpu_s for each in taken) * 1e3:.2f} ms")  # fmt: skip


class _Gap(NamedTuple):
    """Seconds of a call: all, of the thread's CPU time, and in which it could have run and had no core."""

    wall_s: float
    cpu_s: float
    queued_s: float

    @property
    def locked_s(self) -> float:
        """Seconds in which it waited for something else: Python's lock, another one, a file."""
        return max(0.0, self.wall_s - self.cpu_s - self.queued_s)

    def __str__(self) -> str:
        return (f"{self.wall_s * 1e3:.2f} ms ({self.cpu_s * 1e3:.2f} CPU, {self.queued_s * 1e3:.2f} without a core, "
                f"{self.locked_s * 1e3:.2f} else)")  # fmt: skip


def _timed(function: Callable[[], Any], into: Callable[[], list[_Gap]]) -> Callable[[], Any]:
    """Return a function that takes the times of its calls down; by Linux' accounting of the scheduler."""
    def accounted() -> tuple[float, float, float]:
        cpu_ns, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return time.perf_counter(), int(cpu_ns) / 1e9, int(queued_ns) / 1e9

    def timed() -> Any:  # noqa: ANN401
        before = accounted()
        returned = function()
        after = accounted()
        into().append(_Gap(*(stop - start for start, stop in zip(before, after, strict=True))))
        return returned

    return timed


@app.command()
def slots(gguf: Path, libraries: Path, num_tokens: NumTokens = 8192, rounds: int = 3, threads: int = 2) -> None:
    """Measure the second turn after a restart beside llama.cpp's state of a sequence. GGUF: weights of 16 bits."""
    sys.path.append(str(ROOT / "tests"))
    from support import llama_cpp  # noqa: PLC0415 (a module of tests/)

    llama_cpp.NUM_THREADS = threads
    library = llama_cpp._library(libraries)
    with tempfile.TemporaryDirectory() as name:
        model, state, kept = Path(name, "q8_0.gguf"), str(Path(name, "state")).encode(), Path(name, "kept")
        params = library.llama_model_quantize_default_params()
        params.nthread, params.ftype = threads, Q8_0
        assert not library.llama_model_quantize(str(gguf).encode(), str(model).encode(), ctypes.byref(params))
        size = ctypes.c_size_t
        save, load = library.llama_state_seq_save_file, library.llama_state_seq_load_file
        array = ctypes.c_int32 * (num_tokens + NUM_ANSWERED)
        save.restype = load.restype = size
        save.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, array, size]
        load.argtypes = [*save.argtypes, ctypes.POINTER(size)]
        first = [each % 30_000 for each in tokens(num_tokens + NUM_ANSWERED, 1)]
        seconds_of = [[each % 30_000 for each in tokens(NUM_NEW, 2 + number)] for number in range(rounds)]
        room = num_tokens + NUM_ANSWERED + NUM_NEW + 16
        with llama_cpp.LlamaCpp(libraries, model, room) as theirs:
            for start in range(0, len(first), 512):
                _decode(library, theirs, first[start : start + 512], start)
            assert save(theirs._context, state, 0, array(*first), len(first))
        sizes: dict[str, Any] = {
            "max_model_len": room + 64, "max_num_seqs": 4, "num_kv_blocks": 3 * room // 16, "skip_tokenizer_init": True,
        }  # fmt: skip
        with LLM(model, kv_disk_dir=kept, kv_disk_write_rate="4GiB", **sizes) as llm:
            generate(llm, first, 1)
            disk_of(llm).drain(60.0)
        ours_s, theirs_s = list[float](), list[float]()
        for second in seconds_of:   # new in each round: those of the round before are in the folder by now
            with llama_cpp.LlamaCpp(libraries, model, room) as theirs:
                _decode(library, theirs, second[:8], 0)
                library.llama_memory_seq_rm(library.llama_get_memory(theirs._context), 0, 0, -1)
                found, count = array(), size()
                started_s = time.perf_counter()
                assert load(theirs._context, state, 0, found, len(found), ctypes.byref(count))
                _decode(library, theirs, second, len(first))
                theirs_s.append(time.perf_counter() - started_s)
                assert list(found) == first
            with LLM(model, kv_disk_dir=kept, **sizes) as llm:
                generate(llm, second[:8], 1)
                _, num_found, seconds = generate(llm, first + second, 1)
                ours_s.append(seconds)
        state_bytes = Path(name, "state").stat().st_size
    ratios = [ours / theirs for ours, theirs in zip(ours_s, theirs_s, strict=True)]
    print(f"{len(first)} tokens kept and {NUM_NEW} new: ours {min(ours_s):.3f} to {max(ours_s):.3f} s, "
          f"{num_found} found; "
          f"llama.cpp {min(theirs_s):.3f} to {max(theirs_s):.3f} s, a state of {state_bytes / 1e6:.1f} MB; "
          f"ratio {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")  # fmt: skip


def _decode(library: Any, theirs: Any, ids: list[int], start: int) -> None:  # noqa: ANN401
    """Compute tokens of sequence 0 behind `start` others, and the logits of the last."""
    batch = library.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for n, token in enumerate(ids):
        batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, start + n, 1, n == len(ids) - 1
        batch.seq_id[n][0] = 0
    status = library.llama_decode(theirs._context, batch)
    library.llama_batch_free(batch)
    assert status == 0, status


@app.command()
def soak(minutes: float = 20.0, num_kv_blocks: int = 128, seed: int = 0, fault_bytes: int = 4 << 20) -> None:
    """Print descriptors, memory and bytes on the disk while ten times the cache is kept there. The demo model."""
    draws, open_files = random.Random(seed), Path("/proc/self/fd")
    with tempfile.TemporaryDirectory() as name:
        block_bytes = 0
        with LLM(num_kv_blocks=16, max_model_len=128) as llm:
            block_bytes = 16 * llm._open.ready.kv_bytes_per_token
        settings: dict[str, Any] = {
            "kv_disk_dir": name, "kv_disk_size": 10 * num_kv_blocks * (block_bytes + 4096) + (1 << 20),
            "num_kv_blocks": num_kv_blocks, "max_model_len": 512, "max_num_seqs": 4, "kv_disk_write_rate": "4GiB",
            "fault_bytes": fault_bytes,
        }  # fmt: skip
        began_s, shown_s, num_asked = time.monotonic(), 0.0, 0
        with LLM(**settings) as llm:
            prompts = [[draws.randrange(5, 250) for _ in range(draws.randrange(32, 480))] for _ in range(200)]
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)
            while (now_s := time.monotonic() - began_s) < 60 * minutes:
                asked = [{"prompt_token_ids": draws.choice(prompts)} for _ in range(4)]
                llm.generate(asked, params, use_tqdm=False)
                num_asked += len(asked)
                if draws.random() < 0.1:
                    session = llm.create_session(draws.choice(prompts)[:64])
                    session.save(f"s{draws.randrange(4)}")
                    session.delete()
                    llm.restore_session(draws.choice(llm.saved_sessions())).delete()
                disk_of(llm).drain(0.05)
                if now_s >= shown_s:
                    shown_s += 60 * minutes / 20
                    disk = llm.kv_stats().disk
                    used = sum(each.stat().st_blocks * 512 for each in Path(name).rglob("*") if each.is_file())
                    print(f"{now_s:6.0f} s: {num_asked} requests, {len(list(open_files.iterdir()))} descriptors, "
                          f"{_resident_mb():.0f} MB, {used / 1e6:.1f} MB on the disk, "
                          f"{disk['stored_blocks']:.0f} of {disk['slots']:.0f} slots, "
                          f"{disk['evicted_blocks']:.0f} evicted, {disk['loaded_blocks']:.0f} loaded, "
                          f"{disk['bad_blocks']:.0f} bad; {_kept()}", flush=True)  # fmt: skip
            llm._open.assembled.engine.scheduler.check()  # type: ignore[attr-defined]


class _Malloc(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def _kept() -> str:
    """Return what is in use: Python's objects and blocks of memory, and what malloc has given out and keeps free."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Malloc
    found = ask()
    return (f"{len(gc.get_objects())} objects, {sys.getallocatedblocks()} blocks, "
            f"malloc: {found.uordblks / 1e6:.1f} MB used, {found.fordblks / 1e6:.1f} free")  # fmt: skip


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _model(parent: Path) -> Path:
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    return folder


if __name__ == "__main__":
    app()
