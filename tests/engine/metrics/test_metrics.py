"""/metrics: the contract's names and labels, counts of a real engine's run, and pages that Prometheus can read."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from quire.core.deltas import Admission, FinishReason, SequenceDelta
from quire.core.errors import ConfigError, InvalidRequestError, RequestFailedError
from quire.core.kv_identity import FETCH_FAILURES
from quire.core.outputs import KVStats, RequestMetrics, RequestOutput
from quire.core.plan import GraphCounts
from quire.core.sampling_params import SamplingParams
from quire.core.step_times import StepTiming
from quire.engine.launcher import EngineProcess
from quire.engine.messages import EngineDeadError, EngineState, Ready, Stepped
from quire.engine.metrics import page as page_module
from quire.engine.metrics.engine_metrics import CACHE_LABELS, LONGEST_S, RETRY_AFTER_S, TargetCounts
from quire.engine.metrics.page import OLDER_NAMES, QUEUE_BOUNDS, REFUSALS, Histogram, Metrics
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineClient
from quire.engine.processes.streams import RequestStream
from quire.engine.requests.output_processor import FinishedRequest, ProcessedStep
from quire.scheduling.limits import AdmissionLimits
from quire.server.errors import shutting_down
from support.engine_process import TIMEOUT_S, read
from support.http_app import make_app
from support.stopping import stopped

pytestmark = pytest.mark.usefixtures("forked_processes")

DOCS = Path(__file__).parents[3] / "docs"
OWN = {"engine": "0"}
MODEL = {"model_name": "tiny"} | OWN

# Transcribed from the contract and docs/metrics.md: each metric, its type, and the labels there from the start.
GAUGES: dict[str, list[dict[str, str]]] = {
    "vllm:num_requests_running": [MODEL],
    "vllm:num_requests_waiting": [MODEL],
    "vllm:num_requests_waiting_by_reason": [MODEL | {"reason": reason} for reason in ("capacity", "deferred")],
    "vllm:kv_cache_usage_perc": [MODEL],
    "vllm:gpu_cache_usage_perc": [MODEL],
    "vllm:cache_config_info": [MODEL | dict.fromkeys(CACHE_LABELS, "")],
    "vllm:engine_sleep_state": [
        MODEL | {"sleep_state": state} for state in ("awake", "weights_offloaded", "discard_all")
    ],
    "vllm:lora_requests_info": [
        MODEL | {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""},
    ],
    "quire:lora_adapters": [{"state": state} for state in ("running", "waiting")],
    "quire:kv_blocks_pinned": [{}],
    "quire:kv_blocks": [{"state": state} for state in ("free", "cached", "used")],
    "quire:kv_tail_waste_ratio": [{}],
    "quire:kv_block_ref_count": [{"refs": refs} for refs in ("1", "2", "3-4", "5-8", "9+")],
    "quire:num_requests_swapped": [{}],
    "quire:kv_blocks_shared": [{}],
    "quire:kv_blocks_by_owner": [{"owner": "other"}],
    "quire:kv_sequences": [{}],
    "quire:kv_disk_state": [{}],
    "quire:kv_disk_blocks": [{"state": state} for state in ("used", "free")],
    "quire:kv_disk_bytes": [{}],
    "quire:kv_transfer_held_blocks": [{}],
    "quire:kv_transfer_consumers": [{}],
    "quire:kv_transfer_peers": [{"state": state} for state in ("connected", "unconnected", "incompatible")],
    "quire:image_cache_rows": [{}],
    "quire:state_slots": [{"state": state} for state in ("used", "snapshot", "kept", "free")],
    "quire:weights_bytes": [{"dtype": "", "quantization": ""}],
    "quire:cuda_graphs": [{"state": state} for state in ("captured", "failed")],
}
COUNTERS: dict[str, list[dict[str, str]]] = {
    "quire:kv_event_batches_total": [OWN | {"state": state} for state in ("published", "dropped")],
    "vllm:prefix_cache_queries_total": [MODEL],
    "vllm:prefix_cache_hits_total": [MODEL],
    "vllm:gpu_prefix_cache_queries_total": [MODEL],
    "vllm:gpu_prefix_cache_hits_total": [MODEL],
    "vllm:external_prefix_cache_queries_total": [MODEL],
    "vllm:external_prefix_cache_hits_total": [MODEL],
    "vllm:mm_cache_queries_total": [MODEL],
    "vllm:mm_cache_hits_total": [MODEL],
    "vllm:kv_offload_load_bytes_total": [MODEL],
    "vllm:kv_offload_load_time_total": [MODEL],
    "vllm:kv_offload_store_bytes_total": [MODEL],
    "vllm:kv_offload_store_time_total": [MODEL],
    "quire:kv_disk_evicted_blocks_total": [{}],
    "quire:kv_disk_bad_blocks_total": [{}],
    "quire:kv_disk_unwritten_blocks_total": [{"reason": reason} for reason in ("dropped", "failed")],
    "quire:kv_disk_unloaded_total": [{"reason": reason} for reason in ("given_up", "slower")],
    "quire:kv_transfer_tickets_total": [
        {"state": state} for state in ("made", "redeemed", "refused", "expired", "given_back", "stateless")
    ],
    "quire:kv_transfer_bytes_total": [{"direction": each} for each in ("sent", "received")],
    "quire:kv_transfer_seconds_total": [{}],
    "quire:state_snapshots_total": [{}],
    "quire:state_snapshots_evicted_total": [{}],
    "quire:kv_transfer_failed_total": [{"reason": reason} for reason in FETCH_FAILURES],
    "vllm:num_preemptions_total": [MODEL],
    "vllm:spec_decode_num_drafts_total": [MODEL],
    "vllm:spec_decode_num_draft_tokens_total": [MODEL],
    "vllm:spec_decode_num_accepted_tokens_total": [MODEL],
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": [MODEL | {"position": str(each)} for each in range(16)],
    "vllm:prompt_tokens_total": [MODEL],
    "vllm:prompt_tokens_by_source_total": [
        MODEL | {"source": source} for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ],
    "vllm:prompt_tokens_cached_total": [MODEL],
    "vllm:prompt_tokens_cached_by_source_total": [MODEL | {"source": source} for source in ("device", "disk", "p2p")],
    "vllm:generation_tokens_total": [MODEL],
    "vllm:request_success_total": [
        MODEL | {"finished_reason": reason} for reason in ("stop", "length", "repetition", "abort")
    ],
    "vllm:admission_rejections_total": [MODEL | {"reason": bound} for bound in QUEUE_BOUNDS],
    "quire:preemptions_total": [{"mode": mode} for mode in ("recompute", "swap")],
    "quire:recomputed_tokens_total": [{}],
    "quire:kv_blocks_copied_total": [{}],
    "quire:kv_blocks_evicted_total": [{}],
    "quire:kv_blocks_swapped_total": [{"direction": direction} for direction in ("in", "out")],
    "quire:swap_seconds_total": [{}],
    "quire:recompute_seconds_total": [{}],
    "quire:recovery_saved_seconds_total": [{}],
    "quire:trace_spans_dropped_total": [{}],
    "quire:session_calls_total": [{"call": call} for call in ("create", "extend", "fork", "save", "restore")],
    "quire:requests_refused_total": [{"reason": reason} for reason in REFUSALS],
    "quire:requests_failed_total": [{"reason": reason} for reason in ("request_failed", "engine_unhealthy")],
    "quire:requests_aborted_total": [{}],
    "quire:engine_restarts_total": [{}],
    "quire:requests_late_total": [{"state": state} for state in ("prompt", "decoding")],
    "quire:requests_with_target_total": [{"target": target} for target in ("ttft", "itl", "deadline", "all")],
    "quire:requests_on_target_total": [{"target": target} for target in ("ttft", "itl", "deadline", "all")],
    "quire:itl_target_unmet_total": [{}],
}
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_num_preemptions",
    "vllm:request_prompt_tokens",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
    "vllm:iteration_tokens_total",
    "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
    "quire:step_computed_tokens",
    "quire:step_seconds",
    "quire:step_prediction_ratio",
)
KINDS = ("decode", "mixed", "prefill")  # kinds of steps


class Page:
    """One exposition, parsed."""

    def __init__(self, metrics: Metrics, num_queued: int = 0) -> None:
        text = metrics.exposition([num_queued])[0].decode()
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def __getitem__(self, name: str) -> float:
        """Return the only sample of a name."""
        (value,) = self.by_labels(name).values()
        return value

    def by_labels(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """Return the samples of a name by their labels."""
        return {frozenset(sample.labels.items()): sample.value for sample in self.samples if sample.name == name}

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the samples of a name by one label."""
        return {sample.labels[label]: sample.value for sample in self.samples if sample.name == name}


def label_sets(*labels: Mapping[str, str]) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(each.items()) for each in labels}


def stepped(
    state: EngineState, *, admissions: int = 0, started_s: float = 0.0, num_computed_tokens: int = 1
) -> Stepped:
    return Stepped(started_s, num_computed_tokens, [Admission(index, 0) for index in range(admissions)], [], state)


def processed(
    *,
    first_tokens: list[tuple[RequestMetrics, int]] | None = None,
    itl_s: list[float] | None = None,
    finished: list[FinishedRequest] | None = None,
    num_output_tokens: int = 0,
) -> ProcessedStep:
    begun, num_prompt_tokens = [metrics for metrics, _ in first_tokens or []], sum(n for _, n in first_tokens or [])
    return ProcessedStep([], [], begun, itl_s or [], finished or [], num_output_tokens, num_prompt_tokens)


def kv_stats(**values: Any) -> KVStats:  # noqa: ANN401
    return KVStats(
        block_size=16,
        total_blocks=10,
        used_blocks=4,
        cached_blocks=1,
        free_blocks=5,
        shared_blocks=1,
        num_sequences=3,
        tail_waste_slots=16,
        ref_counts={"1": 3, "2": 1},
        **values,  # type: ignore[arg-type]
    )


IDLE = EngineState(0, 0, 0)


# --- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("type_of", "expected"), [("gauge", GAUGES), ("counter", COUNTERS)], ids=["gauge", "counter"])
def test_gauges_and_counters_of_the_contract_are_there_from_the_start_with_all_labels(
    type_of: str, expected: dict[str, list[dict[str, str]]]
) -> None:
    page = Page(Metrics("tiny"))
    types = {family.name: family.type for family in page.families}
    for name, labels in expected.items():
        assert types[name.removesuffix("_total")] == type_of, name
        found = page.by_labels(name)
        assert found.keys() == dict.fromkeys(label_sets(*(OWN | each for each in labels))).keys(), name
        assert sum(found.values()) == (name == "vllm:engine_sleep_state"), name     # the engine is awake


def test_bounds_of_a_family_are_replaced() -> None:
    options = EngineOptions(custom_histogram_buckets='{"request_latency": [0.5, 2], "request_tokens": [7]}')
    found = {each.name: each for each in Metrics("tiny", options=options).values()}
    bounds = {name: [*each.buckets] for name, each in found.items() if isinstance(each, Histogram)}
    assert bounds["vllm:e2e_request_latency_seconds"] == ["0.5", "2.0", "+Inf"]
    assert bounds["vllm:request_prompt_tokens"] == ["7.0", "+Inf"]
    default = {name: [*each.buckets] for each in Metrics("tiny").values() if isinstance(each, Histogram)
               for name in [each.name]}  # fmt: skip
    assert bounds["vllm:time_to_first_token_seconds"] == default["vllm:time_to_first_token_seconds"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "must be a JSON object"),
        ('{"latency": [1]}', "can have request_latency, .* got 'latency'"),
        *((f'{{"request_latency": {bounds}}}', "request_latency must be a list of 1 to 100 numbers above 0, each")
          for bounds in ("[]", "3", "[0, 1]", "[1, 1]", "[2, 1]", "[true]", '["1"]', "[1e999]", f"{[*range(1, 102)]}")),
    ],
)  # fmt: skip
def test_bounds_that_are_none_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineOptions(custom_histogram_buckets=text)


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_of_the_contract_are_there_from_the_start(name: str) -> None:
    page = Page(Metrics("tiny"))
    assert {family.name: family.type for family in page.families}[name] == "histogram"
    own = [MODEL if name.startswith("vllm:") else OWN]
    own = [OWN | {"kind": kind} for kind in KINDS] if name == "quire:step_seconds" else own
    assert page.by_labels(f"{name}_count") == page.by_labels(f"{name}_sum") == dict.fromkeys(label_sets(*own), 0.0)
    assert {key - {("le", dict(key)["le"])} for key in page.by_labels(f"{name}_bucket")} == label_sets(*own)
    assert [float(bound) for bound in page.by(f"{name}_bucket", "le")][-1] == float("inf")


def test_page_has_nothing_but_the_contract_and_the_process() -> None:
    page = Page(Metrics("tiny"))
    own = {sample.name for sample in page.samples if not sample.name.startswith("process_")}
    parts = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")}
    assert own == set(GAUGES) | set(COUNTERS) | parts


def test_content_type_is_of_the_text_format() -> None:
    assert Metrics("tiny").exposition()[1] == "text/plain; version=0.0.4; charset=utf-8"


def test_any_model_name_can_be_read_back() -> None:
    name = 'a "model"\\of\nmine, é'
    assert set(Page(Metrics(name)).by("vllm:request_success_total", "model_name")) == {name}


def test_every_metric_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    missing = [name for name in (*GAUGES, *COUNTERS, *HISTOGRAMS) if f"`{name}`" not in text]
    assert not missing


# --- a real engine ----------------------------------------------------------------------------------------------------


class Watched(Metrics):
    """Metrics that can be waited for, and that abort a request with its second token: a reader might be too late."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__("tiny", options=options)
        self.news = asyncio.Event()
        self.to_abort: RequestStream | None = None

    def on_step(self, step: Stepped, processed: ProcessedStep) -> None:
        self.engines[0].on_step(step, processed)
        self.news.set()
        if self.to_abort is not None and processed.itl_s:
            self.to_abort.abort()

    def on_idle(self, state: EngineState) -> None:
        self.engines[0].on_idle(state)
        self.news.set()

    def on_abort(self, ended: FinishedRequest) -> None:
        self.engines[0].on_abort(ended)

    async def until(self, condition: Callable[[Page], bool]) -> Page:
        """Return the first page of which something is true."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(page := Page(self)):
                self.news.clear()
                await self.news.wait()
        return page


async def ask(client: EngineClient, params: SamplingParams) -> RequestStream:
    prompt = await asyncio.to_thread(client.inputs.tokenize, "def area(shape):")
    prepared = client.prepare(prompt, client.inputs.check_params(params))
    return await client.add(prepared, external_id="", arrival_s=time.monotonic())


async def last_output(client: EngineClient, params: SamplingParams) -> RequestOutput:
    return (await read(await ask(client, params)))[-1]


async def crowded_run() -> tuple[list[RequestOutput], Page]:
    """Run requests in a cache too small for all of them, one to a stop string, and give a last one up.

    Return the answers, and how it stands when all is done.
    """
    options = EngineOptions(  # with prefix caching all share a prompt
        num_kv_blocks=16, max_model_len=160, enable_prefix_caching=False, itl_target_ms=60_000
    )
    metrics = Watched(options)
    client = await EngineClient.connect(EngineProcess.spawn(options), options, metrics)
    try:
        branches = SamplingParams(max_tokens=60, ignore_eos=True, seed=1, n=2)
        line = SamplingParams(max_tokens=60, temperature=0, stop=["\n"], min_tokens=2)
        with stopped(client._connection.engine.process.pid):    # so that all of them run at once
            streams = [await ask(client, branches) for _ in range(4)]
        answers = [(await read(stream))[-1] for stream in streams]
        answers.append(await last_output(client, line))
        metrics.to_abort = await ask(client, SamplingParams(max_tokens=140, ignore_eos=True))
        page = await metrics.until(
            lambda page: page["quire:requests_aborted_total"] == 1 and page["vllm:num_requests_running"] == 0
        )
        return answers, page
    finally:
        await client.close()


def test_run_of_an_engine_is_counted_as_users_saw_it(demo_model: Path) -> None:
    answers, page = asyncio.run(crowded_run())
    choices = [choice for answer in answers for choice in answer.outputs]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    num_prompt_tokens = [len(answer.prompt_token_ids) for answer in answers]
    num_preemptions = sum(answer.metrics.num_preemptions for answer in answers if answer.metrics)
    num_given_up = page["vllm:generation_tokens_total"] - num_tokens
    assert 2 <= num_given_up < 140
    reasons = {"stop": 1, "length": 8, "repetition": 0, "abort": 1}
    assert page.by("vllm:request_success_total", "finished_reason") == reasons
    # Requests that ended by themselves:
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert page[f"vllm:{name}_seconds_count"] == len(answers), name
    for name in ("request_inference_time_seconds", "request_num_preemptions", "request_params_n"):
        assert page[f"vllm:{name}_count"] == len(answers), name
    assert page["vllm:request_num_preemptions_sum"] <= num_preemptions
    assert page["vllm:request_params_n_sum"] == len(choices)
    assert page["vllm:request_generation_tokens_sum"] == num_tokens
    assert page["vllm:request_prompt_tokens_sum"] == sum(num_prompt_tokens)
    # All requests, also the one that was given up:
    assert page["vllm:time_to_first_token_seconds_count"] == len(answers) + 1
    assert page["vllm:inter_token_latency_seconds_count"] == num_tokens - len(choices) + num_given_up - 1
    assert page["vllm:prompt_tokens_total"] == sum(num_prompt_tokens) + num_prompt_tokens[0]
    assert sum(page.by("vllm:prompt_tokens_by_source_total", "source").values()) == page["vllm:prompt_tokens_total"]
    # Under older names:
    for name, older in OLDER_NAMES.items():
        samples = [each for each in page.samples if each.name.startswith(name)]
        assert samples
        for sample in samples:
            under_older = page.by_labels(older + sample.name.removeprefix(name))
            assert under_older[frozenset(sample.labels.items())] == sample.value
    # The engine:
    assert page["vllm:num_preemptions_total"] == num_preemptions > 0
    assert page.by("quire:preemptions_total", "mode") == {"recompute": num_preemptions, "swap": 0}
    assert min(page["quire:recomputed_tokens_total"], page["quire:kv_blocks_copied_total"]) > 0
    assert page["vllm:iteration_tokens_total_sum"] == page["vllm:prompt_tokens_total"] + num_tokens + num_given_up
    assert page["quire:step_computed_tokens_sum"] > num_tokens + page["quire:recomputed_tokens_total"]
    num_steps = page.by("quire:step_seconds_count", "kind")
    assert sum(num_steps.values()) == page["quire:step_computed_tokens_count"]
    assert min(num_steps["decode"], num_steps["prefill"]) > 0
    assert 0 < page["quire:step_prediction_ratio_count"] < sum(num_steps.values())
    # Requests by their targets:
    num_ended = len(answers)
    counted = page.by("quire:requests_with_target_total", "target")
    assert counted == {"ttft": 0, "itl": num_ended, "deadline": 0, "all": num_ended}
    # At the end, when every block is free:
    gauges = ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "quire:kv_tail_waste_ratio")
    assert [page[gauge] for gauge in gauges] == [0, 0, 0]
    assert page.by("quire:kv_blocks", "state") == {"free": 16, "cached": 0, "used": 0}


# --- engine state -----------------------------------------------------------------------------------------------------


def test_gauges_show_the_newest_state_and_keep_the_last_cache() -> None:
    metrics = Metrics("tiny")
    metrics.engines[0].on_step(stepped(EngineState(3, 2, 5, kv_stats(copied_blocks=6))), processed())
    metrics.engines[0].on_step(stepped(EngineState(4, 1, 7)), processed())
    page = Page(metrics)
    assert (page["vllm:num_requests_running"], page["vllm:num_requests_waiting"]) == (4, 1)
    assert page["quire:num_requests_swapped"] == 7
    assert page.by("quire:kv_blocks", "state") == {"free": 5, "cached": 1, "used": 4}
    assert page.by("quire:kv_block_ref_count", "refs") == {"1": 3, "2": 1, "3-4": 0, "5-8": 0, "9+": 0}
    assert (page["vllm:kv_cache_usage_perc"], page["quire:kv_tail_waste_ratio"]) == (0.4, 0.25)
    assert page["quire:kv_blocks_copied_total"] == 6


def test_labels_of_owners_stay_and_are_told_when_they_were_counted() -> None:
    metrics = Metrics("tiny")
    for blocks_by_owner in ({"key-1": 3, "other": 2}, None, {"key-2": 1}):
        state = EngineState(1, 0, 0, kv_stats(blocks_by_owner=blocks_by_owner))
        metrics.engines[0].on_step(stepped(state), processed())
        if blocks_by_owner is None:
            assert Page(metrics).by("quire:kv_blocks_by_owner", "owner") == {"key-1": 3, "other": 2}
    assert Page(metrics).by("quire:kv_blocks_by_owner", "owner") == {"key-1": 0, "key-2": 1, "other": 0}


def test_figures_of_the_cache_are_passed_on() -> None:
    kv = kv_stats(
        swapped_in_blocks=1,
        swapped_out_blocks=2,
        prefix_queries_tokens=3,
        prefix_hits_tokens=4,
        evicted_blocks=5,
        preemptions={"recompute": 6, "swap": 5},
        recomputed_tokens=80,
        swap_s=0.5,
        recompute_s=1.5,
        recovery_saved_s=2.5,
    )
    page = Page(Metrics("tiny", kv))
    assert page.by("quire:kv_blocks_swapped_total", "direction") == {"in": 1, "out": 2}
    assert (page["vllm:prefix_cache_queries_total"], page["vllm:prefix_cache_hits_total"]) == (3, 4)
    assert page.by("quire:preemptions_total", "mode") == {"recompute": 6, "swap": 5}
    assert (page["vllm:num_preemptions_total"], page["quire:recomputed_tokens_total"]) == (11, 80)
    assert [page[f"quire:{name}_seconds_total"] for name in ("swap", "recompute", "recovery_saved")] == [0.5, 1.5, 2.5]
    assert page["quire:kv_blocks_evicted_total"] == 5
    assert (page["quire:kv_blocks_shared"], page["quire:kv_sequences"]) == (1, 3)


@pytest.mark.parametrize(("quantization", "method"), [("", "none"), ("int4: int4 weights in groups of 128", "int4")])
def test_bytes_of_the_weights_are_told_with_their_format(quantization: str, method: str) -> None:
    metrics = Metrics("tiny", options=EngineOptions(enable_prefix_caching=False, num_kv_blocks=8))
    limits = AdmissionLimits(8, block_size=16, max_num_seqs=8, max_model_len=64)
    ready = Ready(
        limits, 64, 100, frozenset(), "bfloat16", "cpu", 5_000_000, 10 << 20, 64, 2, quantization, sliding_window=32
    )
    metrics.engines[0].engine_ready(ready)
    labels = OWN | {"dtype": "bfloat16", "quantization": method}
    expected = {frozenset(labels.items()): 10 << 20}
    assert Page(metrics).by_labels("quire:weights_bytes") == expected
    shown = {
        "block_size": "16", "cache_dtype": "auto", "cpu_offload_gb": "0", "enable_prefix_caching": "False",
        "gpu_memory_utilization": "0.9", "num_gpu_blocks": "8", "num_gpu_blocks_override": "8", "num_cpu_blocks": "2",
        "sliding_window": "32", "swap_space_bytes": "2048", "kv_cache_size_tokens": "128",
        "kv_cache_max_concurrency": "2.00",
    }  # fmt: skip
    assert Page(metrics).by_labels("vllm:cache_config_info") == {frozenset((MODEL | shown).items()): 1}


def test_waiting_requests_are_those_that_were_skipped_and_those_that_lack_room() -> None:
    metrics = Metrics("tiny")
    metrics.engines[0].on_idle(EngineState(0, 5, 0, num_deferred=2))
    assert Page(metrics).by("vllm:num_requests_waiting_by_reason", "reason") == {"capacity": 3, "deferred": 2}


def test_refusals_by_a_full_queue_are_counted_by_its_bound() -> None:
    metrics = Metrics("tiny")
    metrics.queue_full("max_num_queued_tokens")
    page = Page(metrics)
    counted = page.by("vllm:admission_rejections_total", "reason")
    assert counted == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 1}
    assert page.by("quire:requests_refused_total", "reason")["server_overloaded"] == 1


def test_requests_that_the_engine_does_not_know_yet_wait_too() -> None:
    metrics = Metrics("tiny")
    metrics.engines[0].on_idle(EngineState(0, 2, 0))
    assert [Page(metrics, num_queued)["vllm:num_requests_waiting"] for num_queued in (0, 2, 7)] == [2, 2, 7]


# --- targets of time --------------------------------------------------------------------------------------------------


def ended(
    num_gaps: int = 0, num_late_gaps: int = 0, ttft_s: float = 0.0, *, met_deadline: bool | None = None
) -> FinishedRequest:
    times = RequestMetrics(arrival_s=1.0, first_scheduled_s=1.0, first_token_s=1.0 + ttft_s, finished_s=9.0)
    return FinishedRequest(times, 5, num_gaps + 1, ["length"], 9, num_gaps, num_late_gaps, met_deadline)


@pytest.mark.parametrize(
    ("targets", "request_", "met"),
    [
        ((math.inf, math.inf), ended(), {}),
        ((0.5, math.inf), ended(ttft_s=0.5), {"ttft": True, "all": True}),
        ((0.5, math.inf), ended(ttft_s=0.6), {"ttft": False, "all": False}),
        ((math.inf, 0.5), ended(), {"itl": True, "all": True}),
        ((math.inf, 0.5), ended(99, 1), {"itl": False, "all": False}),
        ((math.inf, 0.5), ended(100, 1), {"itl": True, "all": True}),
        ((0.5, 0.5), ended(100, 2), {"ttft": True, "itl": False, "all": False}),
        ((0.5, 0.5), ended(100, 0, ttft_s=0.1), {"ttft": True, "itl": True, "all": True}),
        ((math.inf, math.inf), ended(met_deadline=True), {"deadline": True, "all": True}),
        ((0.5, math.inf), ended(met_deadline=False), {"ttft": True, "deadline": False, "all": False}),
    ],
)
def test_requests_are_counted_by_the_targets_that_they_had_and_met(
    targets: tuple[float, float], request_: FinishedRequest, met: dict[str, bool]
) -> None:
    counts = TargetCounts(*targets)
    counts.count(request_)
    assert {target for target, num in counts.num_with.items() if num} == set(met)
    assert {target: num == 1 for target, num in counts.num_on.items() if target in met} == met


def test_requests_that_are_late_before_their_first_token_miss_their_deadline() -> None:
    metrics = Metrics("tiny")
    late = [SequenceDelta(number, 0, [], error="late", is_late=True) for number in (7, 8)]
    metrics.engines[0].on_step(structs.replace(stepped(IDLE), deltas=late), processed())
    with_target = Page(metrics).by("quire:requests_with_target_total", "target")
    assert with_target == {"ttft": 0, "itl": 0, "deadline": 2, "all": 2}
    assert set(Page(metrics).by("quire:requests_on_target_total", "target").values()) == {0}


def test_times_of_steps_are_counted_by_kind_beside_what_was_predicted() -> None:
    metrics = Metrics("tiny")
    for timing in (
        StepTiming("decode", 0.02),                             # nothing was measured before
        StepTiming("decode", 0.02, 0.8),
        StepTiming("mixed", 0.4, 2.0),
        StepTiming("prefill"),                                  # from an executor without a clock
        None,                                                   # nothing was computed
    ):
        metrics.engines[0].on_step(structs.replace(stepped(IDLE), timing=timing), processed())
    page = Page(metrics)
    assert page.by("quire:step_seconds_count", "kind") == {"decode": 2, "mixed": 1, "prefill": 0}
    assert page.by("quire:step_seconds_sum", "kind") == {"decode": 0.04, "mixed": 0.4, "prefill": 0}
    assert buckets(metrics, "quire:step_prediction_ratio") == {"0.8": 1, "2.0": 1}
    by_kind = {each.labels["kind"]: each.sum for each in metrics.values() if each.name == "quire:step_seconds"}
    assert by_kind == {"decode": 0.04, "mixed": 0.4, "prefill": 0}


def test_steps_over_the_target_are_counted_over_all_engines() -> None:
    metrics = Metrics("tiny")
    for num_unmet in (1, 3):
        metrics.engines[0].on_step(stepped(EngineState(1, 0, 0, num_itl_unmet=num_unmet)), processed())
    metrics.engines[0].engine_died()
    assert Page(metrics)["quire:itl_target_unmet_total"] == 3
    metrics.engines[0].on_idle(EngineState(0, 0, 0, num_itl_unmet=2))
    assert Page(metrics)["quire:itl_target_unmet_total"] == 5


def test_graphs_are_those_of_the_engine_that_lives() -> None:
    metrics = Metrics("tiny")
    metrics.engines[0].on_idle(EngineState(0, 0, 0, graphs=GraphCounts(31, 2)))
    assert Page(metrics).by("quire:cuda_graphs", "state") == {"captured": 31, "failed": 2}
    metrics.engines[0].engine_died()
    assert Page(metrics).by("quire:cuda_graphs", "state") == {"captured": 0, "failed": 0}


# --- histograms -------------------------------------------------------------------------------------------------------


def buckets(metrics: Metrics, name: str) -> dict[str, float]:
    """Return how many values lie in each bucket that has any, by its upper bound."""
    cumulative = Page(metrics).by(f"{name}_bucket", "le")
    counts = [upper - lower for lower, upper in pairwise([0.0, *cumulative.values()])]
    return {bound: count for bound, count in zip(cumulative, counts, strict=True) if count}


def ended(arrival_s: float, first_scheduled_s: float, first_token_s: float, finished_s: float) -> FinishedRequest:
    times = RequestMetrics(arrival_s, first_scheduled_s, first_token_s, finished_s)
    times.num_preemptions, times.num_cached_tokens = 2, 256
    return FinishedRequest(times, 300, num_output_tokens=7, finish_reasons=["stop", "length"], max_tokens=6)


def test_times_of_a_request_lie_between_the_right_moments() -> None:
    metrics = Metrics("tiny")
    request = ended(100.0, 100.5, 102.5, 112.5)
    metrics.engines[0].on_step(stepped(IDLE), processed(first_tokens=[(request.metrics, 300)]))
    metrics.engines[0].on_step(stepped(IDLE), processed(finished=[request]))
    seconds = {
        "time_to_first_token": 2.5,
        "request_queue_time": 0.5,
        "request_prefill_time": 2.0,
        "request_decode_time": 10.0,
        "request_inference_time": 12.0,
        "e2e_request_latency": 12.5,
        "request_time_per_output_token": 10.0 / 6,
    }
    page = Page(metrics)
    assert {name: page[f"vllm:{name}_seconds_sum"] for name in seconds} == seconds
    assert buckets(metrics, "vllm:request_prefill_time_seconds") == {"2.0": 1}     # a bound belongs to its bucket
    assert buckets(metrics, "vllm:e2e_request_latency_seconds") == {"15.0": 1}
    assert buckets(metrics, "vllm:request_prompt_tokens") == {"500.0": 1}
    assert buckets(metrics, "vllm:request_prefill_kv_computed_tokens") == {"50.0": 1}
    assert page["vllm:prompt_tokens_cached_total"] == 256
    by_source = {"local_compute": 44, "local_cache_hit": 256, "external_kv_transfer": 0}
    assert page.by("vllm:prompt_tokens_by_source_total", "source") == by_source
    assert buckets(metrics, "vllm:request_generation_tokens") == {"10.0": 1}
    assert buckets(metrics, "vllm:request_num_preemptions") == {"2.0": 1}
    assert buckets(metrics, "vllm:request_params_n") == {"2.0": 1}
    assert buckets(metrics, "vllm:request_params_max_tokens") == {"10.0": 1}


def test_gaps_are_pooled_over_tokens_and_equal_ones_each_count() -> None:
    metrics = Metrics("tiny")
    metrics.engines[0].on_step(stepped(IDLE), processed(itl_s=[0.03, 0.03, 0.03, 0.2, 100.0]))
    assert buckets(metrics, "vllm:inter_token_latency_seconds") == {"0.05": 3, "0.2": 1, "+Inf": 1}
    assert Page(metrics)["vllm:inter_token_latency_seconds_sum"] == pytest.approx(100.29)


def test_each_step_counts_with_the_tokens_it_computed() -> None:
    metrics = Metrics("tiny")
    for num_tokens in (1, 2048, 7, 20000):
        metrics.engines[0].on_step(stepped(IDLE, num_computed_tokens=num_tokens), processed())
    assert buckets(metrics, "quire:step_computed_tokens") == {"1.0": 1, "8.0": 1, "2048.0": 1, "+Inf": 1}
    assert buckets(metrics, "vllm:iteration_tokens_total") == {}       # no request was given a token


def test_iterations_count_with_the_prompts_that_begin_and_the_tokens_that_they_give() -> None:
    metrics, begun = Metrics("tiny"), [(RequestMetrics(1.0, 2.0, 3.0), 100), (RequestMetrics(1.0, 2.0, 3.0), 20)]
    metrics.engines[0].on_step(stepped(IDLE, num_computed_tokens=7), processed(first_tokens=begun, num_output_tokens=3))
    metrics.engines[0].on_step(stepped(IDLE, num_computed_tokens=2), processed(num_output_tokens=2))
    assert buckets(metrics, "vllm:iteration_tokens_total") == {"8.0": 1, "128.0": 1}
    assert Page(metrics)["vllm:iteration_tokens_total_sum"] == 125


def test_prompts_count_with_the_first_token_and_outputs_as_they_come() -> None:
    metrics = Metrics("tiny")
    begun = [(RequestMetrics(1.0, 2.0, 3.0), 10), (RequestMetrics(1.0, 2.0, 3.0), 20)]
    metrics.engines[0].on_step(stepped(IDLE), processed(first_tokens=begun, num_output_tokens=2))
    metrics.engines[0].on_step(stepped(IDLE), processed(num_output_tokens=3))
    page = Page(metrics)
    assert (page["vllm:prompt_tokens_total"], page["vllm:generation_tokens_total"]) == (30, 5)


# --- ends and refusals ------------------------------------------------------------------------------------------------


def test_aborted_request_counts_once_and_leaves_no_times() -> None:
    metrics = Metrics("tiny")
    reasons: list[FinishReason] = ["stop", "abort", "abort"]
    metrics.engines[0].on_abort(FinishedRequest(RequestMetrics(100.0, None, None, 101.0), 8, 0, reasons))
    page = Page(metrics)
    assert page["quire:requests_aborted_total"] == 1
    counted = {"stop": 1, "length": 0, "repetition": 0, "abort": 2}
    assert page.by("vllm:request_success_total", "finished_reason") == counted
    assert page["vllm:e2e_request_latency_seconds_count"] == page["vllm:request_prompt_tokens_count"] == 0


def test_refusals_are_counted_by_reason() -> None:
    metrics = Metrics("tiny")
    for reason in (*REFUSALS, "server_overloaded"):
        metrics.refused(reason)
    counts = Page(metrics).by("quire:requests_refused_total", "reason")
    assert counts == dict.fromkeys(REFUSALS, 1) | {"server_overloaded": 2}
    with pytest.raises(KeyError):
        metrics.refused("moon phase")


def test_calls_that_fail_are_counted_and_those_at_fault_are_not() -> None:
    service = make_app().state.service
    for failure in (RequestFailedError("NaN"), KeyError(), EngineDeadError("dead")):
        service.to_api_error(failure)
    for refusal in (InvalidRequestError("no"), shutting_down()):
        service.to_api_error(refusal)
    counts = Page(service.metrics).by("quire:requests_failed_total", "reason")
    assert counts == {"request_failed": 2, "engine_unhealthy": 1}


def test_refused_client_is_told_when_the_queue_will_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    metrics = Metrics("tiny")
    assert metrics.retry_after_s(50) == RETRY_AFTER_S
    metrics.engines[0].on_step(stepped(IDLE, admissions=100, started_s=1000.0), processed())
    assert metrics.retry_after_s(50) == 1
    assert metrics.retry_after_s(100_000) == LONGEST_S
    metrics.engines[0].on_idle(IDLE)
    assert metrics.retry_after_s(50) == RETRY_AFTER_S


def test_counters_go_on_when_another_engine_takes_over() -> None:
    metrics = Metrics("tiny")
    figures = kv_stats(copied_blocks=5, swap_s=1.5, prefix_hits_tokens=7, preemptions={"swap": 2})
    metrics.engines[0].on_idle(EngineState(1, 2, 3, figures))
    for _ in range(2):
        metrics.engines[0].engine_died()
        page = Page(metrics)
        assert (page["quire:kv_blocks_copied_total"], page["quire:swap_seconds_total"]) == (5, 1.5)
        assert page["vllm:num_requests_running"] == page["quire:kv_sequences"] == 0
    metrics.engines[0].on_idle(EngineState(0, 0, 0, figures))
    metrics.engines[0].on_idle(EngineState(0, 0, 0, figures))
    page = Page(metrics)
    assert (page["quire:kv_blocks_copied_total"], page["vllm:prefix_cache_hits_total"]) == (10, 14)
    assert page.by("quire:preemptions_total", "mode") == {"recompute": 0, "swap": 4}
    assert page.by("quire:kv_blocks", "state")["used"] == 4
