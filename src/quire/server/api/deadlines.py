"""Deadlines of a call: fields of its body, and a header for proxies, which count from when the body had arrived."""

from typing import Annotated, Protocol

from pydantic import Field
from starlette.requests import Request

from quire.core.checks import check_int, refuse
from quire.core.sampling_params import MAX_DEADLINE_MS, SamplingParams
from quire.server.api.bodies import integer

HEADER = "x-request-deadline-ms"
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
    sent = [_of_header(text) for line in request.headers.getlist(HEADER) for text in line.split(",")]
    if sent:
        own = [] if body.deadline_ms is None else [body.deadline_ms]
        given["deadline_ms"] = min(sent + own)
    return given


def deadline_field(body: WithDeadlines, params: SamplingParams) -> str:
    """Return the name of what `params.deadline_ms` is from: the field of the body, or the header."""
    return "deadline_ms" if params.deadline_ms == body.deadline_ms else HEADER


def _of_header(text: str) -> int:
    text = text.strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not 1 <= int(text) <= MAX_DEADLINE_MS:
        refuse(HEADER, text, f"an integer from 1 to {MAX_DEADLINE_MS}")
    return int(text)
