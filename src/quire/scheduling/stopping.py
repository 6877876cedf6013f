"""What becomes of a sampled token: it is told, and may be the last. Stop strings are text and end at the
output processor instead."""

from quire.core.outputs import SequenceDelta, TokenLogprobs
from quire.core.sequence import Request, Sequence


def check_stop(request: Request, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> SequenceDelta:
    """Return what there is to tell of a sequence's next token; `finish_reason` is set if it is the last.

    An end-of-sequence token of the model ends it with no stop_reason, one of the request's own stop tokens with its id;
    neither counts before params.min_tokens. The token itself stays in the output.
    """
    num_output_tokens = len(sequence.token_ids.output) + 1
    delta = SequenceDelta(request.request_id, sequence.index, [token])
    if logprobs is not None:
        delta.logprobs = [logprobs]
    if num_output_tokens == 1 and sequence.index == 0 and request.prompt_logprobs:
        delta.prompt_logprobs = request.prompt_logprobs
    if num_output_tokens >= request.max_tokens:
        delta.finish_reason = "length"
    is_eos = token in request.eos_token_ids
    if (is_eos or token in request.stop_token_ids) and num_output_tokens >= request.params.min_tokens:
        delta.finish_reason, delta.stop_reason = "stop", None if is_eos else token
    return delta
