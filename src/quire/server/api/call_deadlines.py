"""Deadlines of a call: fields of its body, and a header for proxies, which count from when the body had arrived.

A call is refused when its first token cannot be there in time, before work is done for it. It is checked three times:
before its prompt is rendered, by the work queued before it; before it is tokenized, by half of the tokens that its text
is likely to have; and when it is about to be queued. Quick: no prompt is read.
"""

import time
from typing import Annotated, Protocol

from pydantic import Field
from starlette.requests import Request

from quire.core.checks import check_int, refuse
from quire.core.sampling_params import MAX_DEADLINE_MS, SamplingParams
from quire.core.step_times import StepWork, chunk_work
from quire.engine.processes.queued_requests import Asked
from quire.server.api.api_request import ApiRequest
from quire.server.api.request_bodies import integer
from quire.server.errors import deadline_unmeetable
from quire.server.service import Service

HEADER = "x-request-deadline-ms"
_HEADER = HEADER.encode()
CHARS_PER_TOKEN = 8     # about twice as many as texts have: an estimate refuses only what is far from its bound
_MAX_DIGITS = len(str(MAX_DEADLINE_MS))

Milliseconds = Annotated[int | None, Field(strict=True), integer(1, MAX_DEADLINE_MS)]


class WithDeadlines(Protocol):
    """A body with the fields of deadlines."""

    ttft_deadline_ms: Milliseconds
    deadline_ms: Milliseconds


def deadlines_of(request: Request, body: WithDeadlines) -> dict[str, object]:
    """Return the deadlines of a call as fields of `SamplingParams`: of the header and `deadline_ms` the smallest.

    Several lines of a header are the same as one with commas: a proxy may join them (RFC 9110, section 5.3).
    InvalidRequestError names the field, or the header.
    """
    given: dict[str, object] = {}
    for name in ("ttft_deadline_ms", "deadline_ms"):
        if (value := getattr(body, name)) is not None:
            given[name] = check_int(name, value, 1, MAX_DEADLINE_MS)
    sent: list[int] = []
    for name, value in request.scope["headers"]:
        if name == _HEADER:
            sent += map(_of_header, value.decode("latin-1").split(","))
    if sent:
        own = [] if body.deadline_ms is None else [body.deadline_ms]
        given["deadline_ms"] = min(sent + own)
    return given


def deadline_field(body: WithDeadlines, params: SamplingParams) -> str:
    """Return the name of what `params.deadline_ms` is from: the field of the body, or the header."""
    return "deadline_ms" if params.deadline_ms == body.deadline_ms else HEADER


def check_deadline(service: Service, call: ApiRequest, num_chars: int = 0) -> None:
    """Raise ApiError 429 if the first token of a call cannot be there in time. `num_chars`: of prompts, not tokenized.

    With several prompts, the deadline holds for the last prompt's first token.
    """
    params = call.checked.params
    if params.ttft_deadline_ms is None and params.deadline_ms is None:
        return
    field, asked_s = _first_deadline(call)
    request = call.requests[0].request if len(call.requests) == 1 else None
    prompts = [len(prepared.prompt.token_ids) for prepared in call.requests] or [num_chars // CHARS_PER_TOKEN]
    work = sum((chunk_work(0, num_tokens) for num_tokens in prompts), StepWork())
    weight = call.requests[0].request.weight if call.requests else 1.0
    asked = Asked(work, call.checked.priority, call.client_id, weight, len(prompts))
    passed_s = time.monotonic() - call.received_s
    predicted_s = service.client.first_token_s(asked, request, asked_s - passed_s)
    if predicted_s > asked_s - passed_s:
        service.metrics.refused("deadline_unmeetable")
        raise deadline_unmeetable(passed_s + predicted_s, asked_s, field)


def _first_deadline(call: ApiRequest) -> tuple[str, float]:
    """Return the field, or header, of the earlier deadline, and its seconds."""
    params = call.checked.params
    fields = {"ttft_deadline_ms": params.ttft_deadline_ms, call.deadline_field: params.deadline_ms}
    given = {name: value / 1e3 for name, value in fields.items() if value is not None}
    return min(given.items(), key=lambda item: item[1])


def _of_header(text: str) -> int:
    text = text.strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not 1 <= int(text) <= MAX_DEADLINE_MS:
        refuse(HEADER, text, f"an integer from 1 to {MAX_DEADLINE_MS}")
    return int(text)
