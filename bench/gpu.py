"""CUDA back end on this machine's GPU: whole models on random weights, then kernels.

    python bench/gpu.py              at most 8 minutes, or --budget SECONDS; writes its tables into docs/gpu.md, or
                                     --output FILE
    python bench/gpu.py --dry-run    tiny shapes in Triton's interpreter, on any machine: that it runs, and no figure

Attention is given in bytes of keys and values read per second, beside the card's measured copy bandwidth, and beside
torch's own attention over contiguous keys and values; products in bytes of weights. Models are in the shapes of Llama
3.2 1B and 3.1 8B; the floor of a step is the time that reading the weights and the KV cache once takes at the copy
bandwidth.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from json import dumps
from pathlib import Path
from statistics import median
from typing import Any

DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import quire.engine.loading  # noqa: E402
import quire.model.checkpoints.safetensors  # noqa: E402
import quire.model.checkpoints.tensor_reader  # noqa: E402
import quire.model.loader  # noqa: E402
from quire import LLM, SamplingParams  # noqa: E402
from quire.core.arrays import Array  # noqa: E402
from quire.kernels.choice import cuda_back_end  # noqa: E402
from quire.kernels.cuda.cuda_attention import attend  # noqa: E402
from quire.kernels.linear_weight import LinearWeight  # noqa: E402
from quire.kernels.paged_attention import AttentionSpec, Heads, build_metadata  # noqa: E402
from quire.kernels.torch_arrays import to_array  # noqa: E402
from quire.kernels.triton.few_rows import MAX_ROWS, few_rows_product  # noqa: E402
from quire.kernels.triton.triton_linear import CudaLinear  # noqa: E402
from quire.kernels.triton.triton_norm import TritonNorm  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs/gpu.md"
BEGIN, END = "<!-- figures of bench/gpu.py -->", "<!-- end of figures -->"
BUDGET_S = 440.0  # 8 minutes at most; what has not begun by then is left out, and said so; so what shows most is first
HEAD_START = 3_000_000  # cycles, some 2 ms, that the device spins while the host puts in line what is to be timed
MODEL_WIDTH = 64 if DRY_RUN else 4096
DEVICE = torch.device("cpu" if DRY_RUN else "cuda")
DTYPE = torch.float16 if DRY_RUN else torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM = (4, 2, 32) if DRY_RUN else (32, 8, 128)
BATCHES, CONTEXTS = ((1, 2), (40, 300)) if DRY_RUN else ((1, 4, 16, 64, 256), (512, 2048, 8192, 32768))
PRODUCTS: dict[str, tuple[int, int, str]] = (  # outputs and inputs of a layer of Llama 3.1 8B, its activation
    {"qkv": (96, 64, "none"), "gate, up": (128, 64, "silu_and_mul")}
    if DRY_RUN
    else {
        "qkv": (6144, 4096, "none"), "out": (4096, 4096, "none"), "gate, up": (28672, 4096, "silu_and_mul"),
        "down": (4096, 14336, "none"),
    }
)  # fmt: skip
PRODUCT_ROWS = (1, 3) if DRY_RUN else (1, 8, 16, 32, 64, 256)
PREFILLS = (40,) if DRY_RUN else (512, 2048, 8192)
MAX_KV_BYTES = 16 << 30
SEQUENCES = (1, 2) if DRY_RUN else (1, 16, 64, 256)
PROMPT, OUTPUT = (6, 4) if DRY_RUN else (128, 128)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "torch_dtype": "float16" if DRY_RUN else "bfloat16", "vocab_size": 300 if DRY_RUN else 128_256,
    "max_position_embeddings": 1024, "num_key_value_heads": KV_HEADS, "rope_theta": 500_000.0,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = (
    {"tiny": TINY}
    if DRY_RUN
    else {
        "Llama 3.2 1B": {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "head_dim": 64, "tie_word_embeddings": True,
        },
        "Llama 3.1 8B": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "head_dim": 128,
        },
    }
)  # fmt: skip

FAILED = "Here it failed"
Row = list[str]
Table = tuple[str, Row, Iterator[Row]]


def seconds(run: Callable[[], object], num_bytes: int = 0) -> float:
    """Return the median time of a call on the device, its data not in the device's cache."""
    if DRY_RUN:
        started_s = time.perf_counter()
        run()
        return time.perf_counter() - started_s
    spoil = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE) if num_bytes < 1 << 30 else None
    for _ in range(3):
        run()
    times = []
    for _ in range(10):
        if spoil is not None:
            spoil.zero_()
        torch.cuda._sleep(HEAD_START)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return median(times)


def copy_bandwidth() -> float:
    """Return the bytes per second that a copy within the device reads and writes together."""
    source = torch.empty((1 << 20) if DRY_RUN else (2 << 30), dtype=torch.uint8, device=DEVICE)
    return 2 * source.nbytes / seconds(partial(torch.empty_like(source).copy_, source), source.nbytes)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def decode_rows(bandwidth: float) -> Iterator[Row]:
    """Decode attention over shuffled blocks, beside torch's over contiguous keys and values."""
    for batch in BATCHES:
        for context in CONTEXTS:
            num_bytes = 2 * batch * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize
            let_go()
            if num_bytes > min(MAX_KV_BYTES, MAX_KV_BYTES if DRY_RUN else torch.cuda.mem_get_info()[0] // 3):
                continue
            call = paged_call(batch, context, 1)
            paged_s = seconds(call, num_bytes)
            of_paper = "-"
            if not DRY_RUN:
                call_of_paper = partial(attend, random(*call.args[0].shape), *call.args)
                of_paper = f"{seconds(call_of_paper, num_bytes) / paged_s:.2f}"
                del call_of_paper
            del call
            key, value = (random(batch, KV_HEADS, context, HEAD_DIM) for _ in range(2))
            query = random(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)  # heads of a group see the same: as rows
            plain_s = best_of_torch(partial(F.scaled_dot_product_attention, query, key, value), num_bytes)
            del key, value, query
            rate = num_bytes / paged_s
            slower = f"{paged_s / plain_s - 1:+.0%}"
            yield [str(batch), str(context), f"{rate / 1e9:.0f}", f"{rate / bandwidth:.0%}", slower, of_paper]


def product_rows(bandwidth: float) -> Iterator[Row]:
    """Products of a layer: few rows with the norm in front or the residual behind, by cuBLAS, and those of `--exact`.

    A letter names the bits of the first row's result by cuBLAS: row counts with one letter agree.
    """
    for name, (num_outputs, num_inputs, activation) in PRODUCTS.items():
        weight = LinearWeight.dense((random(num_outputs, num_inputs) * 0.02).bfloat16())
        layer, exact = (CudaLinear(weight, activation=activation, is_exact=is_exact) for is_exact in (False, True))
        inputs, seen = random(PRODUCT_ROWS[-1], num_inputs).bfloat16(), list[bytes]()
        norm = TritonNorm(random(num_inputs).bfloat16(), None, 1e-5, False)
        for num_rows in PRODUCT_ROWS:
            rows, fused = inputs[:num_rows], partial(few_rows_product, inputs[:num_rows], layer)
            if num_outputs == MODEL_WIDTH:
                fused = partial(fused, residual=random(num_rows, num_outputs).bfloat16())
            else:
                fused = partial(fused, norm=norm)
            cells = []
            for call in (fused if num_rows <= MAX_ROWS else None, partial(layer, rows), partial(exact, rows)):
                rate = 0.0 if call is None else weight.num_bytes / seconds(call, weight.num_bytes)
                cells.append(f"{rate / 1e9:.0f}, {rate / bandwidth:.0%}" if call is not None else "-")
            bits = to_array(layer(rows)[0].cpu()).tobytes()
            seen += [bits] if bits not in seen else []
            yield [name, str(num_rows), *cells, "abcdefgh"[seen.index(bits)]]
        let_go()


def best_of_torch(attend: Callable[[], object], num_bytes: int = 0) -> float:
    """Return the median time of the fastest of torch's kernels that can serve this call."""
    times = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(kernel):
                times.append(seconds(attend, num_bytes))
        except RuntimeError:  # it cannot
            continue
    return min(times)


def let_go() -> None:
    """Free device memory that has no references any more."""
    gc.collect()
    if not DRY_RUN:
        torch.cuda.empty_cache()


def paged_call(batch: int, context: int, num_queries: int) -> "partial[object]":
    """Return a call of the paged attention for `batch` sequences, each with its last `num_queries` tokens new."""
    back_end, per_sequence = cuda_back_end(), -(-context // 16)
    key, value = (random(batch * per_sequence, 16, KV_HEADS, HEAD_DIM) for _ in range(2))
    tables = torch.randperm(batch * per_sequence, device=DEVICE).int().view(batch, per_sequence)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * num_queries
    lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    metadata = build_metadata(tables, starts, lens, 16)
    query = random(batch * num_queries, HEADS, HEAD_DIM)
    spec = AttentionSpec(Heads(HEADS, KV_HEADS, HEAD_DIM), HEAD_DIM**-0.5)
    return partial(back_end.paged_attention, spec, query, key, value, metadata)


def prefill_rows() -> Iterator[Row]:
    """Causal attention of one whole prompt."""
    for length in PREFILLS:
        flops = 2 * HEADS * HEAD_DIM * length * length  # two products, half of each
        query, key, value = (random(1, heads, length, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        plain = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
        rates = [flops / time_s / 1e12 for time_s in (seconds(paged_call(1, length, length)), best_of_torch(plain))]
        yield [str(length), *(f"{rate:.1f}" for rate in rates), f"{rates[0] / rates[1]:.0%}"]


def move_rows(bandwidth: float) -> Iterator[Row]:
    """Blocks within the cache, out to pinned host memory, and back in."""
    back_end, count, layers = cuda_back_end(), (2 if DRY_RUN else 256), (2 if DRY_RUN else 32)
    caches = [random(2 * count, 16, KV_HEADS, HEAD_DIM) for _ in range(2 * layers)]
    space = [torch.zeros(count, 16, KV_HEADS, HEAD_DIM, dtype=DTYPE, pin_memory=not DRY_RUN) for _ in caches]
    num_bytes = count * caches[0][0].nbytes * len(caches)
    ids = torch.randperm(2 * count).numpy()
    src, dst, places = ids[:count], ids[count:], np.arange(count)
    for name, call, factor in (
        ("copy within the cache, read and write", partial(back_end.copy_blocks, caches, caches, src, dst), 2),
        ("swap out", partial(back_end.copy_blocks, caches, space, src, places), 1),
        ("swap in", partial(back_end.copy_blocks, space, caches, places, dst), 1),
    ):
        rate = factor * num_bytes / seconds(call, num_bytes)
        yield [name, f"{rate / 1e9:.1f}", f"{rate / bandwidth:.0%}"]


class RandomCheckpoint:
    """The place, the names and the dtype of a checkpoint without files; `random_rows` reads it."""

    names = frozenset({"model.embed_tokens.weight"})

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def location(self, name: str | None = None) -> str:
        return str(self._folder / (name or ""))

    def dtype(self, name: str) -> str:
        return "F16" if DRY_RUN else "BF16"


def random_rows(
    checkpoint: RandomCheckpoint, name: str, shape: tuple[int, ...], rows: tuple[int, int] | None = None,
    dtypes: object = None,
) -> Array:
    """Return small random numbers for rows of any tensor of a `RandomCheckpoint`, or for all of them."""
    start, stop = rows or (0, shape[0])
    return to_array((random(stop - start, *shape[1:]) * 0.02).cpu())


def model_rows(bandwidth: float) -> Iterator[Row]:
    """Greedy answers of whole models, all prompts at once. RuntimeError behind them if a CUDA graph is missing."""
    num_failed = 0
    for name, shape in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(dumps(LLAMA | shape))
            prefill = {"max_num_batched_tokens": SEQUENCES[-1] * PROMPT}  # all in one step, and so they end in one
            with LLM(folder, device=DEVICE.type, num_kv_blocks=64 if DRY_RUN else None, **prefill) as llm:
                is_tied = shape.get("tie_word_embeddings", False)
                unread_bytes = 0 if is_tied else LLAMA["vocab_size"] * shape["hidden_size"] * DTYPE.itemsize
                for num_seqs in SEQUENCES:
                    yield model_row(llm, name, num_seqs, bandwidth, llm._engine.model.weight_bytes - unread_bytes)
                num_failed += graph_counts(llm)["failed"]
        let_go()
    if num_failed:
        raise RuntimeError(f"{num_failed} CUDA graphs could not be captured: some steps were timed without one")


def graph_counts(llm: LLM) -> dict[str, int]:
    """Return the numbers of CUDA graphs that were captured, and of captures that failed, by `captured` and `failed`."""
    return {each.labels["state"]: int(each.value) for each in llm.get_metrics() if each.name == "quire:cuda_graphs"}


def model_row(llm: LLM, name: str, num_seqs: int, bandwidth: float, weight_bytes: int) -> Row:
    """Time the steps in which every sequence decodes, and what share of them the device is at work.

    `weight_bytes`: that a step reads, so without a table of embeddings of which it takes a few rows.
    """
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    prompts = [[(i * 31 + seed) % 299 for i in range(PROMPT)] for seed in range(num_seqs)]
    llm.generate(prompts, replace(params, max_tokens=min(OUTPUT, 16)), use_tqdm=False)  # compiles, captures the graph
    outputs = llm.generate([prompt[1:] for prompt in prompts], params, use_tqdm=False)
    marks = [(out.metrics.first_token_s, out.metrics.finished_s) for out in outputs if out.metrics]
    begin, end = max(first or 0.0 for first, _ in marks), min(last or 0.0 for _, last in marks)
    step_s = max(end - begin, 1e-9) / (OUTPUT - 1)
    kv_bytes = num_seqs * (PROMPT + OUTPUT // 2) * llm._engine.ready.kv_bytes_per_token  # not public
    floor_s = (weight_bytes + kv_bytes) / bandwidth
    return [
        name, str(num_seqs), f"{num_seqs / step_s:.0f}", f"{step_s * 1e3:.2f}", f"{floor_s / step_s:.0%}",
        "" if DRY_RUN else f"{gap_share(llm, prompts, params):.0%}", "{captured}, {failed}".format(**graph_counts(llm)),
    ]  # fmt: skip


def gap_share(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Return the share of a run's time in which no kernel runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        started_s = time.perf_counter()
        llm.generate([prompt[2:] for prompt in prompts], params, use_tqdm=False)
        torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - started_s
    events = [event for event in profile.key_averages() if event.device_type == DeviceType.CUDA]
    busy_s = sum(event.self_device_time_total for event in events) / 1e6
    return max(0.0, 1 - busy_s / elapsed_s)


def transformers_rows() -> Iterator[Row]:
    """The same models by transformers: `generate`, where one batch decodes together, and continuous batching."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 (seconds, and only here)

    for name, shape in MODELS.items():
        config = LlamaConfig(**{key: value for key, value in (LLAMA | shape).items() if key != "architectures"})
        with DEVICE:
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
        for num_seqs in SEQUENCES:
            yield [name, str(num_seqs), rate_of_generate(model, num_seqs), rate_of_continuous_batching(model, num_seqs)]
        del model
        let_go()


def rate_of_generate(model: Any, num_seqs: int) -> str:  # noqa: ANN401 (a class made for a family of models)
    """Return the tokens per second of the second of two calls."""
    ids = torch.randint(0, 299, (num_seqs, PROMPT), device=DEVICE)
    generate = partial(
        model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
        min_new_tokens=OUTPUT, max_new_tokens=OUTPUT,
    )  # fmt: skip
    generate()
    started_s = time.perf_counter()
    generate().tolist()
    return f"{num_seqs * OUTPUT / (time.perf_counter() - started_s):.0f}"


def rate_of_continuous_batching(model: Any, num_seqs: int) -> str:  # noqa: ANN401
    """Return the tokens per second between the first request's admission and the last one's end; set-up not counted."""
    from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415

    answers = model.generate_batch(
        torch.randint(0, 299, (num_seqs, PROMPT)).tolist(),
        generation_config=GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            **({"num_blocks": 16, "max_batch_tokens": 64} if DRY_RUN else {})
        ),
    ).values()
    num_tokens = sum(len(answer.generated_tokens) for answer in answers)
    assert num_tokens == num_seqs * OUTPUT, f"{num_tokens} tokens of {num_seqs} x {OUTPUT}"
    begins, ends = zip(*(answer.lifespan for answer in answers), strict=True)
    return f"{num_tokens / (max(ends) - min(begins)):.0f}"


def tables(bandwidth: float) -> Iterator[Table]:
    """Yield title, head and rows of every table; a row is measured when it is asked for."""
    heads = f"{HEADS} heads over {KV_HEADS} of {HEAD_DIM}, {str(DTYPE).removeprefix('torch.')}"
    yield (
        f"Random weights, {PROMPT} tokens in, {OUTPUT} out, greedy",
        ["model", "sequences", "tokens/s", "ms per step", "floor's share of it", "device idle", "graphs, failed"],
        model_rows(bandwidth),
    )
    yield (
        "Products of a layer of Llama 3.1 8B, bfloat16: GB/s of weights, share of the copy bandwidth",
        ["layer", "rows", "few rows", "cuBLAS", "exact", "bits of cuBLAS"],
        product_rows(bandwidth),
    )
    yield (
        f"Decode attention, {heads}, blocks of 16",
        [
            "sequences", "context", "GB/s of KV", "of the copy bandwidth", "time beside torch's, contiguous",
            "time of the paper's kernel beside Triton's",
        ],
        decode_rows(bandwidth),
    )  # fmt: skip
    yield f"Prefill attention, {heads}", ["tokens", "TFLOP/s", "torch's", "share"], prefill_rows()
    yield "Blocks of 16 tokens, 32 layers", ["what", "GB/s", "of the copy bandwidth"], move_rows(bandwidth)
    head = ["model", "sequences", "generate: tokens/s, prefill included", "continuous batching"]
    yield f"The same by transformers {transformers_version()}", head, transformers_rows()


def transformers_version() -> str:
    """Return the version that is installed; without one, the table fails and the others are measured all the same."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "(not installed)"


def commit_id() -> str:
    """Return the commit of the checkout, or "unknown" where git or its history is missing."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PAGE.parent).stdout
    except OSError:
        return "unknown"
    return found.strip() or "unknown"


def render(title: str, head: Row, rows: Iterator[Row], deadline_s: float) -> list[str]:
    """Return a table's lines; rows that would begin after the deadline are left out, and those after a failure."""
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    is_late = False
    while not is_late:
        try:
            row = next(rows, None)
        except Exception as error:  # the other tables are worth having
            traceback.print_exc()
            return [*lines, "", f"{FAILED}: `{error!r}`".replace("\n", " "), ""]
        if row is None:
            return [*lines, ""]
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
        is_late = time.monotonic() > deadline_s
    return [*lines, "", "The time was up here: what comes after this row was left out.", ""]


def write(lines: list[str], page: Path) -> None:
    """Write the page of `docs/gpu.md` with the figures in place of the old ones."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text("\n".join([before + BEGIN, *lines, END]) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in the interpreter; nothing is written")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="seconds, 440 by default")
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="where the page goes (docs/gpu.md)")
    arguments = parser.parse_args()
    if not DRY_RUN and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --dry-run works without one")
    deadline_s = time.monotonic() + arguments.budget
    quire.model.checkpoints.safetensors.SafetensorsCheckpoint = RandomCheckpoint  # type: ignore[assignment,misc]
    quire.model.checkpoints.tensor_reader.read_rows = random_rows  # type: ignore[assignment]
    if DRY_RUN:
        quire.engine.loading.choose_back_end = lambda *args, **kwargs: cuda_back_end()  # type: ignore[attr-defined]
    bandwidth = copy_bandwidth()
    card = "no card: a dry run" if DRY_RUN else torch.cuda.get_device_name()
    about = f"{card}, {date.today()}, commit {commit_id()}, torch {torch.__version__}"
    lines = ["", f"{about}. A copy within the card reads and writes {bandwidth / 1e9:.0f} GB/s.", ""]
    print(about, flush=True)
    for title, head, rows in tables(bandwidth):
        lines += render(title, head, rows, deadline_s)
        if time.monotonic() > deadline_s:
            break
    if not DRY_RUN:
        write(lines, arguments.output)
        print(f"{sum(line.startswith('###') for line in lines)} tables, in {arguments.output}")
    if any(line.startswith(FAILED) for line in lines):
        raise SystemExit("some of it failed: see above")


if __name__ == "__main__":
    main()
