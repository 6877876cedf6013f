"""vLLM in process, through the steps of its engine."""

import time

import vllm
from protocol import Loaded, Request, Settings, obey
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind


def load(settings: Settings) -> Loaded:
    chosen = {
        "dtype": "bfloat16",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": settings.prefix_caching,
        "load_format": settings.load_format,
        "disable_log_stats": True,
    }
    engine = LLM(settings.model, **chosen).llm_engine
    num_submitted = num_cached_tokens = 0

    def run(requests: list[Request]) -> list[list[float]]:
        nonlocal num_submitted, num_cached_tokens
        first, token_times_s = num_submitted, [[] for _ in requests]
        num_submitted += len(requests)
        started_s = time.perf_counter()
        for number, request in enumerate(requests, first):
            engine.add_request(str(number), {"prompt_token_ids": request.prompt}, sampling_params(request))
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now_s = time.perf_counter() - started_s
            for output in outputs:
                number = int(output.request_id.split("-")[0])  # it appends letters of its own to the id
                token_times_s[number - first] += [now_s] * len(output.outputs[0].token_ids)
                num_cached_tokens += (output.num_cached_tokens or 0) if output.finished else 0
        return token_times_s

    return Loaded(run, {"vllm": vllm.__version__}, chosen, lambda: num_cached_tokens)


def sampling_params(request: Request) -> SamplingParams:
    """Return greedy sampling of exactly the asked length; outputs carry only their new tokens, the cheapest form."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=request.output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


if __name__ == "__main__":
    obey(load)
