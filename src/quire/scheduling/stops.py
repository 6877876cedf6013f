"""When a sequence ends by its tokens. Stop strings are text and end at the output processor instead."""

from quire.core.outputs import FinishReason
from quire.core.sequence import Request, Sequence


def finish_reason(request: Request, sequence: Sequence) -> tuple[FinishReason | None, int | None]:
    """Return (finish_reason, stop_reason) after the last token of `sequence`, or (None, None) if it goes on.

    An end-of-sequence token of the model ends it with no stop_reason, one of the request's own stop tokens with its id;
    neither counts before params.min_tokens. The token itself stays in the output.
    """
    token, num_output_tokens = sequence.token_ids[-1], sequence.num_output_tokens
    if num_output_tokens >= request.params.min_tokens:
        if token in request.eos_token_ids:
            return "stop", None
        if token in request.stop_token_ids:
            return "stop", token
    if num_output_tokens >= request.max_tokens:
        return "length", None
    return None, None
