"""OpenVINO GenAI's continuous batching on the CPU, step by step, with the plugin's own precisions (bf16 on AMX)."""

import time

import numpy as np
import openvino
import openvino_genai
from protocol import Loaded, Request, Settings, obey


def load(settings: Settings) -> Loaded:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings.kv_cache_gib
    scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
    scheduler.max_num_seqs = settings.max_num_seqs
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = settings.prefix_caching
    properties = {"INFERENCE_NUM_THREADS": settings.num_threads, "PERFORMANCE_HINT": "LATENCY"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings.model, scheduler, "CPU", properties)
    num_submitted = 0

    def run(requests: list[Request]) -> list[list[float]]:
        nonlocal num_submitted
        token_times_s: list[list[float]] = [[] for _ in requests]
        prompts = [openvino.Tensor(np.array([request.prompt], dtype=np.int64)) for request in requests]
        started_s = time.perf_counter()
        handles = []
        for prompt, request in zip(prompts, requests, strict=True):
            handles.append(pipeline.add_request(num_submitted, prompt, generation_config(request)))
            num_submitted += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now_s = time.perf_counter() - started_s
            for handle, times_s in zip(handles, token_times_s, strict=True):
                while handle.can_read():
                    times_s.extend(now_s for output in handle.read().values() for _ in output.generated_ids)
        return token_times_s

    versions = {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__}
    return Loaded(run, versions, properties | {"scheduler": scheduler.to_string()})


def generation_config(request: Request) -> openvino_genai.GenerationConfig:
    """Return greedy generation of exactly the asked length."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.output_len
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    obey(load)
