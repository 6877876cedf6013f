"""Quire in process, through `LLM`."""

from protocol import Loaded, Request, Settings, obey

import quire
from quire import LLM
from quire_lab.bench.passes import latency_pass
from quire_lab.sim.workloads import WorkItem


def load(settings: Settings) -> Loaded:
    chosen = {
        "dtype": "bfloat16",
        "kv_cache_memory": f"{settings.kv_cache_gib}GiB",
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enable_prefix_caching": settings.prefix_caching,
        "quantization": settings.quantization,
        "model_impl": settings.model_impl,
        "load_format": settings.load_format,
    }
    llm = LLM(model=settings.model, **chosen)

    def run(requests: list[Request]) -> list[list[float]]:
        items = [WorkItem(request.prompt, request.output_len) for request in requests]
        return [timeline.token_times_s for timeline in latency_pass(llm, items, concurrency=len(items))]

    return Loaded(run, {"quire": quire.__version__}, chosen, lambda: llm.kv_stats().prefix_hits_tokens)


if __name__ == "__main__":
    obey(load)
