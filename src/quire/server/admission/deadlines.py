"""Deadlines at admission: a call whose first token cannot be there in time is refused before work is done for it.

A call is looked at three times: before its prompt is rendered, by what waits before it; before it is tokenized, by half
of the tokens that its text is likely to have; and when it is about to be queued. Quick: no prompt is read.
"""

import math
import time

from quire.core.step_times import StepWork, chunk_work
from quire.engine.base_client import BaseClient
from quire.engine.observation import Observation
from quire.engine.queued_requests import Asked
from quire.server.api.request import ApiRequest
from quire.server.errors import deadline_unmeetable

RESERVE = 0.05          # added to a predicted time: the client sees a token a little later than the engine gives it
CHARS_PER_TOKEN = 8     # about twice as many as texts have: an estimate refuses only what is far from its bound


def check_deadline(client: BaseClient, metrics: Observation, call: ApiRequest, num_chars: int = 0) -> None:
    """Raise ApiError 429 if the first token of a call cannot be there in time. `num_chars`: of prompts, not tokenized.

    Of a call of several prompts it is the last one's.
    """
    field, asked_s = _first_deadline(call)
    if asked_s == math.inf:
        return
    request = call.requests[0].request if len(call.requests) == 1 else None
    prompts = [len(prepared.prompt.token_ids) for prepared in call.requests] or [num_chars // CHARS_PER_TOKEN]
    work = sum((chunk_work(0, num_tokens) for num_tokens in prompts), StepWork())
    weight = call.requests[0].request.weight if call.requests else 1.0
    asked = Asked(work, call.checked.priority, call.client_id, weight, len(prompts))
    predicted_s = time.monotonic() - call.received_s + (1 + RESERVE) * client.first_token_s(asked, request)
    if predicted_s > asked_s:
        metrics.refused("deadline_unmeetable")
        raise deadline_unmeetable(predicted_s, asked_s, field)


def _first_deadline(call: ApiRequest) -> tuple[str, float]:
    """Return the field, or header, of the earlier deadline, and its seconds; infinity if there is none."""
    fields = {"ttft_deadline_ms": call.params.ttft_deadline_ms, call.deadline_field: call.params.deadline_ms}
    given = {name: value / 1e3 for name, value in fields.items() if value is not None}
    return min(given.items(), key=lambda item: item[1], default=("", math.inf))
