"""llama.cpp's library over a GGUF file, one request after the other; the libraries are in the folder LLAMA_CPP."""

import os
import sys
import time
from pathlib import Path

import numpy as np
from protocol import Loaded, Request, Settings, obey

sys.path.append(str(Path(__file__).parents[3] / "tests"))

from support import llama_cpp


def load(settings: Settings) -> Loaded:
    llama_cpp.NUM_THREADS = settings.num_threads
    model = llama_cpp.LlamaCpp(Path(os.environ["LLAMA_CPP"]), Path(settings.model), settings.max_model_len)

    def run(requests: list[Request]) -> list[list[float]]:
        started_s = time.perf_counter()
        return [answer(request, started_s) for request in requests]

    def answer(request: Request, started_s: float) -> list[float]:
        ids, start, token_times_s = request.prompt, 0, list[float]()
        while len(token_times_s) < request.output_len:
            logits = model.last_logits(ids, start)
            start += len(ids)
            ids = [int(np.argmax(logits))]
            token_times_s.append(time.perf_counter() - started_s)
        return token_times_s

    return Loaded(run, {"llama.cpp": "0.5.0"}, {"threads": settings.num_threads})


if __name__ == "__main__":
    obey(load)
