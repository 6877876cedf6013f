"""Report of a run against a server: every figure, from recorded times alone."""

from collections import Counter
from collections.abc import Sequence

from quire_lab.bench.diagnosis import LatencyLimits, diagnose, observe
from quire_lab.bench.http_load import LoadRun, SentRequest
from quire_lab.bench.report import Record
from quire_lab.sim.statistics import latencies

_KV_NAMES = (
    *("mean_kv_usage", "peak_kv_usage", "mean_tail_waste", "peak_tail_waste"),
    *("prefix_hit_rate", "num_preemptions"),
)


def serve_record(run: LoadRun, use: Record, limits: LatencyLimits) -> Record:
    """Return the figures of a run; `use` is what the server said of itself, empty where it says nothing."""
    figures = {name: values._asdict() for name, values in latencies(run.timelines).items()}
    facts: dict[str, Record] = {
        "rates": _rates(run, limits),
        "requests": _request_counts(run),
        "limits": limits.given and limits.given | {"attained": limits.num_met(run.timelines) / run.num_due},
        "batch": _batch(run, use),
        "kv_cache": {name: use[name] for name in _KV_NAMES if name in use},
        "errors": dict(Counter(failure.label for failure in run.failures)),
        "error_messages": {failure.label: failure.message for failure in run.failures},
        "client": _client(run),
    }
    goodput = {"request_goodput": facts["rates"]["goodput_rps"]} if limits.given else {}  # vLLM's name of it
    return {"figures": figures, **{name: values for name, values in facts.items() if values}, **goodput}


def sentence(run: LoadRun, use: Record, limits: LatencyLimits) -> str:
    """Return the diagnosis of what the client saw and the server reported."""
    if not run.finished:
        return f"Nothing was answered; {len(run.failures)} requests failed."
    prompt_lens = [len(request.item.prompt_token_ids) for request in run.finished]
    reported = {name: use[name] for name in ("mean_waiting", "num_preemptions", "peak_kv_usage") if name in use}
    queue_s, num_failed = use.get("mean_queue_s"), len(run.failures)
    return diagnose(observe(run.timelines, prompt_lens, limits, queue_s=queue_s, num_failed=num_failed, **reported))


def request_records(requests: Sequence[SentRequest]) -> list[Record]:
    """Return a record of every request that was sent, for the JSON."""
    return [
        {
            "due_s": request.due_s,
            "sent_s": request.sent_s,
            "num_prompt_tokens": len(request.item.prompt_token_ids),
            "num_cached_tokens": request.answer.num_cached_tokens,
            "num_output_tokens": request.num_output_tokens,
            "ttft_s": request.timeline.ttft_s if request.answer.token_times_s else None,
            "e2e_s": request.timeline.e2e_s if request.is_finished else None,
            "error": request.answer.failure.label if request.answer.failure else None,
        }
        for request in requests
    ]


def _rates(run: LoadRun, limits: LatencyLimits) -> Record:
    """Return what was asked and done per second, over the whole run, its end included."""
    num_prompt_tokens = sum(len(request.item.prompt_token_ids) for request in run.finished)
    offered_rps = run.schedule.offered_rps
    rates = {} if offered_rps is None else {"offered_rps": offered_rps}
    rates |= {
        "requests_per_s": len(run.finished) / run.duration_s,
        "tokens_per_s": run.num_output_tokens / run.duration_s,
        "total_tokens_per_s": (num_prompt_tokens + run.num_output_tokens) / run.duration_s,
    }
    if limits.given:
        rates["goodput_rps"] = limits.num_met(run.timelines) / run.duration_s
    return rates


def _request_counts(run: LoadRun) -> Record:
    """Return the outcomes of the requests, and the number of tokens."""
    return {
        "num_requests": run.num_due,
        "num_finished": len(run.finished),
        "num_failed": len(run.failures),
        "num_cut": run.num_due - len(run.finished) - len(run.failures),
        "num_output_tokens": run.num_output_tokens,
        "num_asked_tokens": sum(request.item.output_len for request in run.requests),
        "duration_s": run.duration_s,
    }


def _batch(run: LoadRun, use: Record) -> Record:
    """Return how many requests ran together: by the server's word, else by Little's law over what was open here."""
    waiting = {name: use[name] for name in ("mean_waiting", "peak_waiting", "mean_queue_s") if name in use}
    if "mean_running" in use:
        return {"mean_size": use["mean_running"], "source": f"/metrics, {use['num_samples']} samples"} | waiting
    open_s = sum(_open_s(request, run.duration_s) for request in run.requests)
    return {"mean_size": open_s / run.duration_s, "source": "requests open at the client (Little's law)"} | waiting


def _open_s(request: SentRequest, end_s: float) -> float:
    """Return how long the server had the request; a failed one counts as never there."""
    if request.answer.failure is not None:
        return 0.0
    return (request.answer.token_times_s[-1] if request.is_finished else end_s) - request.sent_s


def _client(run: LoadRun) -> Record:
    """Return what this client cost, and how late it was: figures of a busy client are not the server's."""
    num_chunks = sum(request.answer.num_chunks for request in run.requests)
    num_arrivals = sum(len(request.answer.token_times_s) for request in run.requests)
    record = {
        "cpu_share": run.client_cpu_s / run.duration_s,
        "max_late_s": max((request.sent_s - request.due_s for request in run.requests), default=0.0),
    }
    if num_arrivals:
        record["cpu_us_per_chunk"] = run.client_cpu_s / num_chunks * 1e6
        record["tokens_per_chunk"] = run.num_output_tokens / num_arrivals
    return record
