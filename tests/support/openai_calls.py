"""Calls as the routes make them, for tests of what is written in answer."""

import json
from collections.abc import Sequence
from typing import Any

from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.processes.client import PreparedRequest
from quire.engine.requests.input_processor import CheckedParams, TokenizedPrompt
from quire.server.apis.completions.completion_bodies import CompletionBody, StreamOptions
from quire.server.apis.completions.openai_response import OpenAIRequest
from quire.server.tools.served_formats import OutputReading


def call_of(
    *,
    model: str = "tiny",
    prompts: Sequence[list[int]] = ([5],),
    texts: Sequence[str] | None = None,
    include_usage: bool = False,
    return_token_ids: bool = False,
    return_prompt_logprobs: bool = False,
    reading: OutputReading | None = None,
    **params: Any,  # noqa: ANN401 (JSON)
) -> OpenAIRequest:
    """Return a call with prompts of token ids, or with `texts` that became them."""
    sampling = SamplingParams(**params)
    requests = [
        PreparedRequest(
            Request(number, token_ids, sampling, seed=0, max_tokens=1),
            TokenizedPrompt(None if texts is None else texts[number], token_ids),
        )
        for number, token_ids in enumerate(map(pack_tokens, prompts))
    ]
    body = CompletionBody(
        prompt="",
        return_token_ids=return_token_ids,
        prompt_logprobs=0 if return_prompt_logprobs else None,
        stream_options=StreamOptions(include_usage=include_usage),
    )
    checked = CheckedParams(sampling, None, 0, None)
    return OpenAIRequest(id="call", model=model, created=0, checked=checked, requests=requests, body=body,
                         reading=reading)  # fmt: skip


def events_in(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a piece of a stream."""
    *events, rest = stream.decode().split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
