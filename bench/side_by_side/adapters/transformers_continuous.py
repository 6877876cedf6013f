"""transformers' continuous batching. Its thread and its cache live for one run, and are not timed."""

import time

from protocol import PAD_TOKEN, Loaded, Request, Settings, obey
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers_model import load_model, versions

BLOCK_SIZE = 32
NUM_BLOCKS = 1024


def load(settings: Settings) -> Loaded:
    model = load_model(settings)
    generation = GenerationConfig(do_sample=False, pad_token_id=PAD_TOKEN, eos_token_id=-1)
    chosen = {
        "page_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "max_batch_tokens": settings.max_num_batched_tokens,
        "max_requests_per_batch": settings.max_num_seqs,
        "allow_block_sharing": settings.prefix_caching,
    }
    config = ContinuousBatchingConfig(**chosen)

    def run(requests: list[Request]) -> list[list[float]]:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, timeout=5, warmup=False
        ) as manager:
            started_s = time.perf_counter()
            places = {
                manager.add_request(
                    request.prompt, max_new_tokens=request.output_len, eos_token_id=-1, record_timestamps=True
                ): place
                for place, request in enumerate(requests)
            }
            token_times_s: dict[int, list[float]] = {}
            while len(token_times_s) < len(requests):
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    token_times_s[places[output.request_id]] = [time_s - started_s for time_s in output.timestamps]
                elif not manager.is_running():
                    raise RuntimeError("transformers' continuous batching has stopped")
        return [token_times_s[place] for place in range(len(requests))]

    return Loaded(run, versions(), chosen)


if __name__ == "__main__":
    obey(load)
