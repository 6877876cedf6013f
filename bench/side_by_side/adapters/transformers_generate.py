"""transformers' `generate` over batches of 16, padded on the left, each as long as its longest answer."""

import time

import torch
from protocol import PAD_TOKEN, Loaded, Request, Settings, obey
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers_model import load_model, versions

BATCH = 16


class TokenClock(StoppingCriteria):
    """Never stops anything; notes when each token of the batch was made."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load(settings: Settings) -> Loaded:
    model = load_model(settings)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=PAD_TOKEN, eos_token_id=None)

    def run_batch(requests: list[Request], started_s: float) -> list[list[float]]:
        longest = max(len(request.prompt) for request in requests)
        padding = [longest - len(request.prompt) for request in requests]
        clock = TokenClock()
        with torch.inference_mode():
            model.generate(
                torch.tensor([[PAD_TOKEN] * pad + r.prompt for pad, r in zip(padding, requests, strict=True)]),
                attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
                max_new_tokens=max(request.output_len for request in requests),
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        times_s = [time_s - started_s for time_s in clock.times_s]
        return [times_s[: request.output_len] for request in requests]

    def run(requests: list[Request]) -> list[list[float]]:
        started_s = time.perf_counter()
        batches = [requests[i : i + BATCH] for i in range(0, len(requests), BATCH)]
        return [times_s for batch in batches for times_s in run_batch(batch, started_s)]

    return Loaded(run, versions(), {"batch": BATCH})


if __name__ == "__main__":
    obey(load)
