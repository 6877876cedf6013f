"""A child's side: load one engine, then run a list of requests for every line on standard input.

    parent: [[[token ids], output length], ...]
    child:  {"token_times_s": [[seconds from when all were submitted to each token], ...],  a list per request
             "num_cached_tokens": of the prompts, found in a prefix cache; null where the engine does not tell}

The child's first line comes after the engine's first token and is {"versions": ..., "settings": ...}. Answers go to a
file descriptor of their own, as libraries print what they like. Standard library only: this runs in each engine's own
environment. Between lines the child waits in `readline`, and uses no CPU unless its engine does.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

PAD_TOKEN = 0  # masked out, so any id will do


class Request(NamedTuple):
    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The same for every engine, as far as it can be told."""

    model: str  # folder, in the engine's own format
    num_threads: int
    prefix_caching: bool = False
    quantization: str | None = None  # where the engine quantizes weights itself
    model_impl: str = "auto"  # Quire's
    load_format: str = "auto"  # "dummy": random weights for the config in the folder
    kv_cache_gib: int = 2
    max_num_seqs: int = 64
    max_model_len: int = 4096
    max_num_batched_tokens: int = 2048


class Loaded(NamedTuple):
    """An engine that is ready: what runs requests, all submitted at once, greedy, of exactly the asked lengths."""

    run: Callable[[list[Request]], list[list[float]]]
    versions: dict[str, str]
    settings: dict[str, Any]  # what was set, in the engine's own words
    num_cached_tokens: Callable[[], int] | None = None  # all prompts' since the start, found in a prefix cache


def obey(load: Callable[[Settings], Loaded]) -> None:
    """Load the engine with the settings of argument 1, answer on the descriptor of argument 2 until the input ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        engine = load(settings)
        engine.run([Request([1, 2, 3, 4], 1)])
        _say(answers, {"versions": engine.versions, "settings": engine.settings})
        for line in sys.stdin:
            requests = [Request(prompt, output_len) for prompt, output_len in json.loads(line)]
            _say(answers, _answer(engine, requests))


def _answer(engine: Loaded, requests: list[Request]) -> dict[str, Any]:
    count = engine.num_cached_tokens
    before = count() if count else 0
    token_times_s = engine.run(requests)
    return {"token_times_s": token_times_s, "num_cached_tokens": count() - before if count else None}


def _say(answers: Any, message: object) -> None:  # noqa: ANN401 (a text file)
    answers.write(json.dumps(message) + "\n")
    answers.flush()
