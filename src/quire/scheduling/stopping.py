"""Stop checks on tokens: end-of-sequence and stop tokens, max_tokens. Stop strings are found in text, by the engine."""

from itertools import chain, repeat

from quire.core.deltas import SequenceDelta, TokenLogprobs
from quire.core.plan import RowResult
from quire.core.repetition import RepetitionDetector
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request, Sequence

REPETITION_DETECTED = "repetition_detected"


def check_stop(request: Request, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> SequenceDelta:
    """Return the delta of a sequence's next token; `finish_reason` is set if the token ends the sequence.

    One of the request's stop tokens ends it with its id as the stop_reason, the end-of-sequence token with none;
    neither counts before params.min_tokens. The token itself stays in the output.
    """
    num_output_tokens = len(sequence.token_ids.output) + 1
    delta = SequenceDelta(request.request_id, sequence.index, [token])
    if logprobs is not None:
        delta.logprobs = [logprobs]
    if num_output_tokens == 1 and sequence.index == 0:
        delta.prompt_logprobs = request.prompt_logprobs or None
        delta.prompt_scores = bytes(request.prompt_scores) or None
    if num_output_tokens >= request.max_tokens:
        delta.finish_reason = "length"
    is_stop = token in request.stop_token_ids
    if (is_stop or token in request.eos_token_ids) and num_output_tokens >= request.params.min_tokens:
        delta.finish_reason, delta.stop_reason = "stop", token if is_stop else None
    detection = request.params.repetition_detection
    if detection is not None and delta.finish_reason is None and _repeats(request.params, sequence, token):
        delta.finish_reason, delta.stop_reason = "repetition", REPETITION_DETECTED
    return delta


def _repeats(params: SamplingParams, sequence: Sequence, token: int) -> bool:
    """Take the next token of a sequence; return whether a pattern has repeated, not before params.min_tokens."""
    assert params.repetition_detection is not None, "the request asks for it"
    if sequence.repetitions is None:
        sequence.repetitions = RepetitionDetector(params.repetition_detection)
    output = sequence.token_ids.output
    return sequence.repetitions.append(output, token) and len(output) + 1 >= params.min_tokens


def append_tokens(request: Request, sequence: Sequence, row: RowResult) -> SequenceDelta:
    """Append a row's tokens to its sequence up to the first that ends it, and return them as one delta.

    A row that has ended with its last token ends by "stop", also where that token is the last of max_tokens.
    """
    asks_logprobs = request.params.logprobs is not None
    assert not (asks_logprobs and row.forced), "a forced token has no logprobs"
    assert not asks_logprobs or len(row.logprobs or ()) == len(row.token_ids), "a token without logprobs"
    whole = SequenceDelta(request.request_id, sequence.index, [], pooled=row.pooled)
    logprobs = chain(row.logprobs or (), repeat(None))
    for token, record in zip(chain(row.token_ids, row.forced), logprobs, strict=False):
        delta = check_stop(request, sequence, token, record)
        sequence.token_ids.output.append(token)
        whole.token_ids.append(token)
        whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
        whole.prompt_scores = whole.prompt_scores or delta.prompt_scores
        if delta.logprobs is not None:
            whole.logprobs = (whole.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
            break
    is_whole = len(whole.token_ids) == len(row.token_ids) + len(row.forced)
    if row.has_ended and is_whole and whole.finish_reason != "stop":
        whole.finish_reason, whole.ends_with_text = "stop", True
    return whole
