"""Covering table of every axis of settings: no value of one, beside any value of another, changes a bit of an answer.

Each row of the table is an engine, a request and other requests beside it. Tokens and logprobs equal those of the same
request alone, on the same model, dtypes and instruction set, with one thread and the cache off. A new axis, or a new
value of one, is a line of `AXES`; the rows follow (support/pairwise.py). `make matrix` runs a second table, in which
every pair has other company, and products of some axes.
"""

import atexit
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.core.sequence import Request
from quire.core.step_times import StepTimes
from quire.engine.parallel import starters
from quire.engine.parallel.starters import ForkedRanks
from quire.extension.isas import usable_isas
from quire.kernels.choice import choose_back_end
from quire.scheduling.plan_builder import PlanBuilder
from support.answers import Answer, answers_of
from support.oracle_drafter import let_draft
from support.pairwise import pairwise
from support.peft_folders import write_adapter
from support.random_model import write_random_model
from support.small_tokenizers import write_byte_tokenizer
from support.threads import set_num_threads

NUM_TOKENS = 8
PREFIX_LENS = {"random": 270, "demo_model": 150, "stories260k": 150}  # 270: past the border of a kernel's partition
MAX_ROWS = 120

AXES = {
    "isa": usable_isas() or ("auto",),                                      # auto: PyTorch's stand-ins
    "model": ("random", "demo_model", "stories260k"),
    "dtype": ("float32", "bfloat16"),
    "weights": ("dense", "int8", "int4"),
    "kv_dtype": ("auto", "int8_per_token_head"),
    "num_threads": (1, 2),
    "block_size": (8, 16, 64, 128),
    "budget": (1, 7, 33, 2048),                                             # tokens of a step
    "hit": ("off", "cold", "no block", "one block", "blocks", "inside", "all"),  # the cache, and where a match ends
    "preemption": ("none", "recompute", "swap", "crowded"),                 # crowded: the pool is nearly full
    "branches": ("one", "four", "beams"),
    "sampling": ("greedy", "top_p", "top_k", "min_p"),
    "company": ("none", "three"),                                           # other requests, one of which is aborted
    "grammar": ("none", "masked", "forced"),                                # forced: and tokens are appended unsampled
    "speculation": ("none", "ngram", "suffix", "draft", "oracle"),          # oracle: drafts that are mostly right
    "tensor_parallel": (1, 2, 3) if usable_isas() else (1,),                # ranks as threads
    "adapter": ("none", "alone", "several"),                                # several: other requests have others
    "itl_target_ms": (None, 1, 50),                                         # 1: less than a decode takes
    "disk": ("none", "warm", "cold", "spoilt", "full", "slow"),             # the tier's, with what was computed before
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    "top_k": {"temperature": 1.1, "seed": 4, "top_k": 20, "repetition_penalty": 1.2},
    "min_p": {"temperature": 1.0, "seed": 5, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.2},
}


GRAMMARS = {  # none of them ends within NUM_TOKENS
    "none": None,
    "masked": StructuredOutputsParams(regex="[a-z ]{60}"),
    "forced": StructuredOutputsParams(regex="one [a-z ]{60}"),
}


DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None, "ngram": {"method": "ngram", "prompt_lookup_min": 1}, "suffix": {"method": "suffix"},
    "oracle": {"method": "ngram"},
}  # fmt: skip
DEMO_DRAFT = Path(__file__).parents[1] / "data/demo-draft"


class Row(NamedTuple):
    """A value of each axis."""

    isa: str
    model: str
    dtype: str
    weights: str
    kv_dtype: str
    num_threads: int
    block_size: int
    budget: int
    hit: str
    preemption: str
    branches: str
    sampling: str
    company: str
    grammar: str
    speculation: str
    tensor_parallel: int
    adapter: str
    itl_target_ms: float | None
    disk: str

    def __str__(self) -> str:
        """Return the values of the axes that have several."""
        return "-".join(str(value) for name, value in self._asdict().items() if len(AXES[name]) > 1)


ROWS, OTHER_ROWS = ([Row(*each) for each in pairwise([AXES[name] for name in Row._fields], seed)] for seed in (0, 2))
PLAIN = Row(*(AXES[name][0] for name in Row._fields))


class Model(NamedTuple):
    """A model as an engine loads it, and the instruction set that computes."""

    folder: str
    prefix_len: int
    dtype: str
    weights: str
    isa: str
    kv_dtype: str
    tokenizer: str | None  # tokenizer of another model, for one that has none

    def llm(self, **options: Any) -> LLM:  # noqa: ANN401
        return LLM(
            self.folder, tokenizer=self.tokenizer, dtype=self.dtype, cpu_isa=self.isa, kv_cache_dtype=self.kv_dtype,
            quantization=None if self.weights == "dense" else self.weights,
            max_model_len=self.max_model_len, **options,
        )  # fmt: skip

    @property
    def max_model_len(self) -> int:
        return self.prefix_len + 5 + NUM_TOKENS


@cache
def random_tokens(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 300) for _ in range(length))


COMPANY = [(random_tokens(10, 40), "min_p"), (random_tokens(11, 1), "greedy"), (random_tokens(12, 65), "top_p")]


def prompt_for(hit: str, prefix: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """Return a prompt that has as much in common with `prefix` as the value of the axis says."""
    in_blocks = len(prefix) // block_size * block_size
    num_common = {
        "off": len(prefix), "cold": len(prefix), "no block": 0, "one block": block_size,
        "blocks": in_blocks, "inside": in_blocks - 3, "all": in_blocks,
    }[hit]  # fmt: skip
    return prefix[:num_common] + (() if hit == "all" else random_tokens(2, 5))


def common_length(prefix: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Return how many tokens two runs begin with alike."""
    differing = (place for place, (a, b) in enumerate(zip(prefix, prompt, strict=False)) if a != b)
    return next(differing, min(len(prefix), len(prompt)))


def params_of(sampling: str, branches: str = "one", grammar: str = "none") -> SamplingParams:
    num, logprobs = 4 if branches == "four" else 1, None if grammar == "forced" else 2
    constraint = GRAMMARS[grammar]
    return SamplingParams(
        n=num, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=logprobs, structured_outputs=constraint,
        **SAMPLING[sampling],
    )  # fmt: skip


def ask(
    llm: LLM, prompt: tuple[int, ...], branches: str, sampling: str, grammar: str = "none",
    adapter: LoRARequest | None = None,
) -> RequestOutput:  # fmt: skip
    if branches == "beams":
        params = BeamSearchParams(4, NUM_TOKENS, ignore_eos=True)
        (output,) = llm.beam_search([list(prompt)], params, use_tqdm=False, lora_request=adapter)
    else:
        answers = params_of(sampling, branches, grammar)
        (output,) = llm.generate([list(prompt)], answers, use_tqdm=False, lora_request=adapter)
    return output


@cache
def alone(
    model: Model, prompt: tuple[int, ...], branches: str, sampling: str, grammar: str = "none",
    adapter: LoRARequest | None = None,
) -> list[Answer]:  # fmt: skip
    set_num_threads(1)
    with model.llm(enable_prefix_caching=False, enable_jump_forward=False, enable_lora=adapter is not None) as llm:
        return answers_of(ask(llm, prompt, branches, sampling, grammar, adapter))


@cache
def adapters_of(folder: Path) -> tuple[LoRARequest, LoRARequest]:
    """Write two adapters of a model, of all and of some modules."""
    root = Path(tempfile.mkdtemp(prefix="adapters-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    write_adapter(root / "all", folder, 1, size=0.3)
    write_adapter(root / "some", folder, 2, targets=("v_proj", "up_proj", "o_proj"), rank=3, size=0.3)
    return LoRARequest("all", 1, str(root / "all")), LoRARequest("some", 2, str(root / "some"))


def preempt_at_every_position(llm: LLM, num_tokens: int = 1) -> None:
    """Let the engine preempt each later request in every step in which it has more tokens, or fewer branches.

    num_tokens: so many more, or fewer ones. A sequence that is preempted has lost its drafts.
    """
    llm._engine.engine._max_steps_in_flight = 1  # each step is planned when the tokens before it are known
    scheduler = llm._engine.engine.scheduler
    plan_running: Callable[[PlanBuilder, PlanBuilder, int], int] = scheduler.planner.plan_running
    spared = {request.request_id for request in scheduler.queues.running}
    lengths: dict[int, int] = {}

    def preempt_first(step: PlanBuilder, last: PlanBuilder, budget: int) -> int:
        for request in scheduler.queues.running[::-1]:
            change = abs(length_of(request) - lengths.get(request.request_id, 0))
            if request.request_id not in spared and change >= num_tokens and length_of(request) > 0:
                lengths[request.request_id] = length_of(request)
                scheduler.planner.preempt(step, request)
        return plan_running(step, last, budget)

    scheduler.planner.plan_running = preempt_first  # type: ignore[method-assign]


def length_of(request: Request) -> int:
    return sum(sequence.num_output_tokens for sequence in request.live)


def num_blocks(row: Row, model: Model) -> int:
    """Return the size of the pool: with room for everything, or for hardly more than the request itself."""
    own = -(-model.max_model_len // row.block_size) + 4 * (1 + -(-NUM_TOKENS // row.block_size)) + 2
    return own if row.preemption == "crowded" else own + 2000 // row.block_size


@contextmanager
def ranks_as(make: type[ForkedRanks]) -> Iterator[None]:
    """Let engines start their ranks like this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starters, "ForkedRanks", make)
        yield


def fix_times(llm: LLM) -> None:
    """Let the engine plan by prices of its own, so that the rows are the same on every machine."""
    time = llm._engine.engine.scheduler.planner.time
    time.record(StepTimes(step_s=0.002, token_s=0.001, attended_s=1e-6, context_s=1e-6, sample_s=0.001))
    time.record = lambda times: None  # type: ignore[method-assign]


def speculation(row: Row, folder: Path) -> dict[str, Any] | None:
    """Return the settings of a row's drafter. The demo model has a draft model; the others draft for themselves."""
    if row.speculation != "draft":
        return DRAFTERS[row.speculation]
    return {"method": "draft_model", "model": str(DEMO_DRAFT if row.model == "demo_model" else folder)}


def has_disk(row: Row) -> bool:
    """Return whether a row has a disk tier: it needs the prefix cache, and one rank of the C++ kernels."""
    return row.disk != "none" and row.hit != "off" and row.tensor_parallel == 1 and bool(usable_isas())


def keep_on_disk(llm: LLM, prefix: tuple[int, ...], adapter: LoRARequest | None) -> None:
    """Let an engine compute a prefix and write it to its disk; then its cache is empty."""
    ask(llm, prefix, "one", "greedy", adapter=adapter)
    engine = llm._engine.engine
    engine.disk.drain(60.0)
    pool = engine.scheduler.cache.prefixes.pool
    for block in pool.allocate(pool.num_free_blocks):
        pool.release(block)


def spoil(directory: Path, slot_bytes: int) -> None:
    """Change a byte of every second block that a closed store has, the second one first."""
    for path in directory.glob("*/*/blocks"):
        with path.open("r+b") as file:
            for offset in range(slot_bytes, path.stat().st_size, 2 * slot_bytes):
                file.seek(offset + 5)
                octet = file.read(1)
                file.seek(offset + 5)
                file.write(bytes([octet[0] ^ 1]))


def slow_down(llm: LLM) -> None:
    """Let the store of an engine tell of what it has done at every fifth look alone."""
    store, looks = llm._engine.engine.disk._store, count(1)
    finished = store.finished
    store.finished = lambda: [] if next(looks) % 5 else finished()


@contextmanager
def with_disk(
    row: Row, prefix: tuple[int, ...], adapter: LoRARequest | None, open_llm: Callable[..., LLM]
) -> Iterator[LLM]:
    """Open the engine of a row over a folder to which an engine has written the prefix, the same one or another."""
    with tempfile.TemporaryDirectory() as name:
        directory, size = Path(name, "kept"), "64MiB"
        with open_llm(kv_disk_dir=directory, kv_disk_size=size) as llm:
            sizes = llm._engine.engine.disk._store._writer.sizes
            if row.disk == "full":
                size = 65536 + 3 * (sizes.slot_bytes + 4096)
            else:
                keep_on_disk(llm, prefix, adapter)
            if row.disk == "warm":
                yield llm
                return
        if row.disk == "full":
            with open_llm(kv_disk_dir=directory, kv_disk_size=size) as llm:
                keep_on_disk(llm, prefix, adapter)
        if row.disk == "spoilt":
            spoil(directory, sizes.slot_bytes)
        with open_llm(kv_disk_dir=directory, kv_disk_size=size) as llm:
            if row.disk == "slow":
                slow_down(llm)
            yield llm


def check_row(row: Row, folder: Path, ranks: type[ForkedRanks] | None = None) -> None:
    """`ranks`: of tensor parallelism; None: threads."""
    if ranks is None and row.tensor_parallel > 1:  # no row without the C++ extension, which the module imports
        from support.thread_ranks import ThreadRanks

        ranks = ThreadRanks
    if torch.cuda.is_available():
        if (row.kv_dtype, row.weights, row.adapter) != ("auto", "dense", "none"):
            pytest.skip("a GPU has no quantized weights, no KV cache in 8 bits and no adapters yet")
        if row.speculation == "draft":
            pytest.skip("a GPU has no draft models yet")
    grammar = "none" if row.branches == "beams" else row.grammar
    tokenizer = write_byte_tokenizer(folder) if row.model == "random" else None
    model = Model(str(folder), PREFIX_LENS[row.model], row.dtype, row.weights, row.isa, row.kv_dtype, tokenizer)
    prefix = random_tokens(1, model.prefix_len)
    prompt, is_swap = prompt_for(row.hit, prefix, row.block_size), row.preemption == "swap"
    beside = COMPANY if row.company == "three" else []
    sampling = "greedy" if row.branches == "beams" else row.sampling
    own, another = (None, None) if row.adapter == "none" else adapters_of(folder)
    others = [another, None, own] if row.adapter == "several" else [None] * len(COMPANY)
    expected = alone(model, prompt, row.branches, sampling, grammar, own)
    expected_beside = [
        alone(model, other, "one", sampling, "none", its)
        for (other, sampling), its in zip(beside, others[: len(beside)], strict=True)
    ]
    set_num_threads(row.num_threads)
    open_llm = partial(
        model.llm,
        tensor_parallel_size=row.tensor_parallel,
        block_size=row.block_size,
        max_num_batched_tokens=row.budget,
        num_kv_blocks=num_blocks(row, model),
        enable_prefix_caching=row.hit != "off",
        speculative_config=speculation(row, folder),
        preemption_mode="swap" if is_swap else "recompute",
        num_swap_blocks=1000 // row.block_size if is_swap else None,
        enable_lora=row.adapter != "none",
        itl_target_ms=row.itl_target_ms,
    )
    with (
        ranks_as(ranks or ForkedRanks), with_disk(row, prefix, own, open_llm) if has_disk(row) else open_llm() as llm
    ):  # fmt: skip
        fix_times(llm)
        wholes = [list(prompt + each.token_ids) for each in expected] if row.speculation == "oracle" else None
        drafts = None if row.speculation == "none" else let_draft(llm, wholes)
        if row.hit not in ("off", "cold") and not has_disk(row):
            ask(llm, prefix, "one", "greedy", adapter=own)
        streams = [
            llm.stream([list(other)], params_of(sampling), lora_request=its)
            for (other, sampling), its in zip(beside, others[: len(beside)], strict=True)
        ]
        last = [next(stream) for stream in streams]
        if row.preemption in ("recompute", "swap"):
            preempt_at_every_position(llm, 1 if drafts is None else 3)
        output = ask(llm, prompt, row.branches, row.sampling, grammar, own)
        for stream in streams[:1]:
            stream.close()  # type: ignore[attr-defined]
        last[1:] = [[latest, *stream][-1] for latest, stream in zip(last[1:], streams[1:], strict=True)]
        stats = llm.kv_stats()
    assert answers_of(output) == expected
    assert [answers_of(other) for other in last[1:]] == expected_beside[1:]
    assert (stats.used_blocks, stats.swap_used_blocks) == (0, 0)
    if row.preemption == "crowded":
        return
    if not has_disk(row):
        assert (output.num_cached_tokens > 0) == (row.hit not in ("off", "cold", "no block"))
    elif row.disk in ("warm", "cold", "slow"):
        num_stored = min(len(prefix) - len(prefix) % row.block_size, common_length(prefix, prompt))
        assert (output.num_cached_tokens > 0) == (num_stored >= 2 * row.block_size)
    num_steps = NUM_TOKENS - (len("ne ") if grammar == "forced" else 0)  # at least
    num_preemptions = 0 if row.preemption == "none" else num_steps - 1 if drafts is None else 1
    assert stats.preemptions.get("swap" if is_swap else "recompute", 0) >= num_preemptions
    assert (stats.swapped_out_blocks > 0) == is_swap


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model of the axis, or skip."""
    own = write_random_model(tmp_path_factory.mktemp("random-model"))
    return lambda name: own if name == "random" else request.getfixturevalue(name)


@pytest.fixture(autouse=True)
def _engine_as_before() -> Iterator[None]:
    """Put back the number of threads and the instruction set, which are the whole process's."""
    num_threads = torch.get_num_threads()
    yield
    set_num_threads(num_threads)
    choose_back_end(torch.device("cpu"))


def test_table_is_small() -> None:
    assert len(ROWS) + len(OTHER_ROWS) <= MAX_ROWS


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(row, marks=pytest.mark.matrix) for row in OTHER_ROWS)], ids=str)
def test_any_two_settings_together_change_nothing(folders: Callable[[str], Path], row: Row) -> None:
    check_row(row, folders(row.model))


@pytest.mark.parametrize("row", [row for row in ROWS + OTHER_ROWS if row.tensor_parallel > 1][::8][:6], ids=str)
def test_ranks_as_processes_change_nothing(folders: Callable[[str], Path], row: Row) -> None:
    check_row(row, folders(row.model), ForkedRanks)


def test_swapped_beams_keep_their_bits(folders: Callable[[str], Path]) -> None:
    """A row whose name is the same on every machine, for `test_imitated_gpu.py`."""
    row = PLAIN._replace(model="stories260k", dtype="bfloat16", block_size=16, budget=33, hit="one block")
    check_row(row._replace(preemption="swap", branches="beams", company="three"), folders("stories260k"))


@pytest.mark.parametrize("grammar", ["masked", "forced"])
def test_grammars_keep_their_bits(folders: Callable[[str], Path], grammar: str) -> None:
    """Rows whose names are the same on every machine, as above."""
    row = PLAIN._replace(model="stories260k", dtype="bfloat16", block_size=16, sampling="top_p")
    check_row(row._replace(hit="one block", preemption="recompute", grammar=grammar), folders("stories260k"))


@pytest.mark.matrix
@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("model", "branches"), list(product(AXES["model"], AXES["branches"])))
def test_all_settings_of_sharing_with_ranks_as_processes_change_nothing(
    folders: Callable[[str], Path], num_ranks: int, model: str, branches: str
) -> None:
    for hit, preemption in product(AXES["hit"], AXES["preemption"]):
        row = PLAIN._replace(model=model, branches=branches, budget=33, tensor_parallel=num_ranks)
        check_row(row._replace(hit=hit, preemption=preemption), folders(model), ForkedRanks)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "dtype", "block_size", "branches"),
    list(product(*(AXES[name] for name in ("model", "dtype", "block_size", "branches")))),
)
def test_all_settings_of_sharing_together_change_nothing(
    folders: Callable[[str], Path], model: str, dtype: str, block_size: int, branches: str
) -> None:
    for budget, hit, preemption in product(AXES["budget"], AXES["hit"], AXES["preemption"]):
        row = PLAIN._replace(model=model, dtype=dtype, block_size=block_size, branches=branches)
        check_row(row._replace(budget=budget, hit=hit, preemption=preemption), folders(model))
