"""Room for logprobs is reserved for a whole call, and refused where there is none."""

import pytest

from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.requests.input_processor import PreparedRequest, TokenizedPrompt
from quire.server.errors import ApiError
from quire.server.limits.memory import LogprobMemory
from quire.server.options import Limits


def request(max_tokens: int = 10, prompt: int = 5, **params: object) -> PreparedRequest:
    tokens, sampling = pack_tokens([5] * prompt), SamplingParams(**params)  # type: ignore[arg-type]
    return PreparedRequest(Request(1, tokens, sampling, seed=0, max_tokens=max_tokens), TokenizedPrompt(None, tokens))


def test_what_a_call_may_come_to_is_reserved_until_it_is_released() -> None:
    room = LogprobMemory()
    reserved = room.reserve([request(n=3, logprobs=4), request(logprobs=0, prompt_logprobs=1)], Limits())
    assert room.num_bytes == 16 * (3 * 10 * 5 + 10 + 5 * 2)
    for _ in range(2):
        reserved.release()
        assert room.num_bytes == 0
    named = room.reserve([request(prompt_logprob_token_ids=[[1, 2], [3]])], Limits())
    assert room.num_bytes == 16 * 5 * 2
    named.release()
    room.reserve([request(n=64)], Limits())
    assert room.num_bytes == 0, "without logprobs there is nothing to hold"


def test_call_that_is_too_large_is_refused_for_good() -> None:
    room, limits = LogprobMemory(), Limits(max_output_candidates=100, max_logprob_bytes=16 * 200)
    room.reserve([request(n=2, logprobs=4)], limits)
    told = r"n 2, max_tokens 10 and logprobs 4 come to 200 .*100 \(max_output_candidates\)"
    with pytest.raises(ApiError, match=told) as refused:
        room.reserve([request(n=2, logprobs=4), request(n=2, logprobs=4)], limits)
    assert (refused.value.status, refused.value.param) == (400, "logprobs")
    with pytest.raises(ApiError, match=r"3280 bytes: at most 3200 \(max_logprob_bytes\)") as refused:
        room.reserve([request(logprobs=0, prompt=195, prompt_logprobs=0)], limits)
    assert refused.value.status == 400


def test_calls_share_one_budget() -> None:
    room, limits = LogprobMemory(), Limits(max_logprob_bytes=16 * 100)
    first = room.reserve([request(logprobs=5)], limits)
    with pytest.raises(ApiError, match=r"960 bytes .* 1600 \(max_logprob_bytes\)") as refused:
        room.reserve([request(logprobs=4)], limits)
    assert (refused.value.status, refused.value.code) == (429, "server_overloaded")
    assert int(refused.value.headers["Retry-After"]) >= 1
    first.release()
    room.reserve([request(logprobs=4)], limits)
