"""A streamed answer: arrivals, counts and failures, however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_lab.bench.http_load import AnswerStream, Failure, refusal
from support.completions_server import DONE, event, token_chunk, usage_chunk


def fed(*pieces: bytes) -> AnswerStream:
    """Return the stream after the pieces, which come at 0, 1, 2, ... seconds."""
    answer = AnswerStream()
    for second, piece in enumerate(pieces):
        answer.feed(piece, float(second))
    return answer


def test_chunks_with_text_are_arrivals_and_usage_counts_tokens() -> None:
    answer = fed(token_chunk(), token_chunk(" two tokens"), usage_chunk(3), DONE)
    assert answer.token_times_s == [0.0, 1.0]
    assert answer.num_usage_tokens == 3
    assert answer.is_done
    assert answer.failure is None


def test_chunks_read_together_arrived_together() -> None:
    assert fed(token_chunk(), token_chunk() + token_chunk() + DONE).token_times_s == [0.0, 1.0, 1.0]


def test_chunk_without_text_counts_by_its_token_ids_or_not_at_all() -> None:
    without = event({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
    with_ids = event({"choices": [{"index": 0, "text": "", "token_ids": [7], "prompt_token_ids": [1, 2]}]})
    assert fed(without, with_ids, DONE).token_times_s == [1.0]


def test_answer_without_any_text_arrives_with_its_end() -> None:
    answer = fed(event({"choices": [{"index": 0, "text": ""}]}), usage_chunk(1), DONE)
    assert answer.token_times_s == [2.0]


def test_cached_tokens_are_taken_from_usage() -> None:
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 48}}
    assert fed(event({"choices": [], "usage": usage})).num_cached_tokens == 48


def test_comments_other_fields_and_carriage_returns_are_no_events() -> None:
    answer = fed(b": ping\r\n\r\nevent: x\r\n" + token_chunk().replace(b"\n", b"\r\n"), DONE)
    assert answer.token_times_s == [0.0]
    assert answer.num_chunks == 2


@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_cuts_between_reads_change_no_count(cuts: list[int]) -> None:
    whole = token_chunk(" é漢") + token_chunk() + usage_chunk(2) + DONE
    ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    answer = fed(*(whole[start:stop] for start, stop in pairwise(ends)))
    assert (len(answer.token_times_s), answer.num_usage_tokens, answer.num_chunks, answer.is_done) == (2, 2, 4, True)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        ({"message": "m", "type": "server_error", "code": "engine_unhealthy"},
         Failure("in the stream engine_unhealthy", "m")),
        ({"message": "m", "type": "server_error", "code": None}, Failure("in the stream server_error", "m")),
        ("plain words", Failure("in the stream", "plain words")),
    ],
)
def test_error_frame_ends_the_answer_as_failed(error: object, failure: Failure) -> None:
    answer = fed(token_chunk(), event({"error": error}), DONE)
    assert answer.failure == failure
    assert not answer.is_done
    assert answer.token_times_s == [0.0]


@pytest.mark.parametrize("line", [b"data: {\n", b"data: 5\n", b"data: \xff\n", b'data: {"choices": 1}\n'])
def test_event_that_is_no_chunk_is_a_failure(line: bytes) -> None:
    failure = fed(line).failure
    assert failure is not None
    assert failure.label == "malformed stream"


def test_event_without_end_is_a_failure() -> None:
    failure = fed(b"data: " + b"x" * (1 << 21)).failure
    assert failure is not None
    assert failure.label == "malformed stream"


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b'{"error": {"message": "m", "type": "t", "param": null, "code": "too_long"}}', Failure("400 too_long", "m")),
        (b'{"error": {"message": "m", "type": "BadRequest", "code": 0}}', Failure("400 BadRequest", "m")),
        (b'{"error": "words"}', Failure("400", "words")),
        (b'{"detail": "words"}', Failure("400", '{"detail": "words"}')),
        (b"<html>", Failure("400", "<html>")),
        (b"\xff", Failure("400", "\ufffd")),
        (b"", Failure("400", "")),
    ],
)
def test_refusal_is_named_by_status_and_code(body: bytes, failure: Failure) -> None:
    assert refusal(400, body) == failure
