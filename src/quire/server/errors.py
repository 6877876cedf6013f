"""Errors of the API: one JSON form, unless an API has one of its own, and one place that chooses the status."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from quire.core.checks import shown
from quire.core.errors import (
    SESSION_STATUS,
    DeadlineExceededError,
    EngineAsleepError,
    EngineError,
    InvalidRequestError,
    SessionError,
    UnknownPrefixError,
)
from quire.engine.messages import EngineDeadError
from quire.engine.metrics.engine_metrics import RETRY_AFTER_S

INVALID = "invalid_request_error"
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # raised by msgspec.json.decode
MAX_QUOTED_CHARS = 200  # longest part of a URL in an error


class ApiError(Exception):
    """An error response: a status of the contract with its type and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,  # noqa: A002 (the field's name)
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body, also the last event of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> NoReturn:
    """Raise ApiError 400 for the value of a field."""
    raise ApiError(400, message, param=param, code=code)


def unsupported(param: str, value: object) -> NoReturn:
    """Raise ApiError 400 for a known parameter that is not implemented."""
    given = param if isinstance(value, list | dict) else f"{param} {shown(value)}"
    raise ApiError(400, f"{given} is not supported yet", param=param, code="unsupported_parameter")


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameters of errors, which are the engine's names, to the fields that the client used."""
    try:
        yield
    except (InvalidRequestError, DeadlineExceededError) as error:
        raise_renamed(error, names)


def raise_renamed(error: InvalidRequestError | DeadlineExceededError, names: Mapping[str, str]) -> NoReturn:
    """Raise an error with its parameter, an engine's name, renamed to the field that the client used."""
    asked = names.get(error.param or "")
    if asked is None:
        raise error
    if isinstance(error, DeadlineExceededError):
        raise DeadlineExceededError(str(error).replace(f"({error.param})", f"({asked})"), param=asked) from error
    message = str(error)
    if message.startswith(f"{error.param} "):
        message = asked + message.removeprefix(error.param or "")
    raise ApiError(400, message, param=asked, code=error.code) from error


def engine_unhealthy(message: str) -> ApiError:
    """Return the error for a dead or stalled engine."""
    return _retryable(503, message, "engine_unhealthy")


def asleep() -> ApiError:
    """Return the refusal of a request while the engine sleeps."""
    return _retryable(503, str(EngineAsleepError()), "asleep")


def shutting_down() -> ApiError:
    """Return the refusal of a request while the server drains."""
    return _retryable(503, "the server is shutting down", "shutting_down")


def overloaded(num_queued: int, limit: int, retry_after_s: int) -> ApiError:
    """Return the refusal of a request when the queue is full."""
    message = f"{num_queued} requests wait already, and at most {limit} may (max_queued_requests)"
    return _retryable(429, message, "server_overloaded", retry_after_s)


def image_memory_full(num_bytes: int, limit: int) -> ApiError:
    """Return the refusal of a call with images that do not fit beside those of other calls."""
    message = f"images of requests hold {num_bytes} of {limit} bytes (max_total_image_bytes), one client at most half"
    return _retryable(429, message, "server_overloaded", 1)


def too_many_queued_tokens(num_queued: int, limit: int, retry_after_s: int) -> ApiError:
    """Return the refusal of a call with more prompt tokens than the queue has room for."""
    message = f"{num_queued} prompt tokens x n wait already, and at most {limit} may (max_queued_tokens)"
    return _retryable(429, message, "server_overloaded", retry_after_s)


def deadline_unmeetable(predicted_s: float, asked_s: float, field: str) -> ApiError:
    """Return the refusal of a request that misses its deadline for the first token; times count from its arrival."""
    predicted_ms, asked_ms = math.ceil(predicted_s * 1e3), round(asked_s * 1e3)
    predicted = f"the first token would be there after about {predicted_ms} ms"
    message = f"{predicted}, and is asked for within {asked_ms} ms ({field})"
    error = _retryable(429, message, "deadline_unmeetable", math.ceil(predicted_s - asked_s))
    error.param = field
    return error


def logprob_memory_full(num_bytes: int, limit: int) -> ApiError:
    """Return the refusal of a call that may exceed the memory for the logprobs of all calls."""
    message = f"{num_bytes} bytes are reserved for logprobs of other calls, of {limit} (max_logprob_bytes)"
    return _retryable(429, message, "server_overloaded")


def too_many_requests(num_held: int, limit: int) -> ApiError:
    """Return the refusal of a request of a client that has too many already."""
    message = f"{num_held} requests of this key wait or run already, and at most {limit} may (max_requests_per_key)"
    return _retryable(429, message, "key_limit")


def too_many_connections(limit: int) -> ApiError:
    """Return the refusal of a connection past the bound."""
    message = f"{limit} connections are open already, the most that this server holds"
    return _retryable(429, message, "server_overloaded", 1)


def body_memory_full(max_bytes: int) -> ApiError:
    """Return the refusal of a body past the bound on all bodies; the rest of it is not read."""
    message = f"the bodies of all requests may have at most {max_bytes} bytes together (max_total_body_bytes)"
    error = _retryable(429, message, "server_overloaded", 1)
    error.headers["Connection"] = "close"
    return error


def _retryable(status: int, message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Return a temporary error, with the seconds until a retry, at least 1."""
    kind = "rate_limit_error" if status == 429 else "server_error"
    return ApiError(status, message, type=kind, code=code, headers={"Retry-After": str(max(1, retry_after_s))})


def as_api_error(error: Exception) -> ApiError:
    """Return the API error for any exception of a request."""
    match error:
        case ApiError():
            return error
        case UnknownPrefixError():
            return ApiError(404, str(error), param=error.param, code=error.code)
        case InvalidRequestError():
            status = SESSION_STATUS.get(str(error.code), 400) if isinstance(error, SessionError) else 400
            kind = INVALID if status < 500 else "server_error"
            return ApiError(status, str(error), type=kind, param=error.param, code=error.code)
        case DeadlineExceededError():
            return ApiError(504, str(error), type="server_error", code="deadline_exceeded")
        case EngineAsleepError() | EngineDeadError():
            return asleep() if isinstance(error, EngineAsleepError) else engine_unhealthy(str(error))
        case _:
            message = "the request failed inside the server; its log has the details"
            return ApiError(500, message, type="server_error", code="request_failed")


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response of an error, in the form of the API that the request is for."""
    path = scope["path"]
    for start, form in scope["app"].state.error_forms.items():
        if path == start or path.startswith(f"{start}/"):
            return JSONResponse(form(error), error.status, error.headers)
    return JSONResponse(error.body, error.status, error.headers)


def handle_errors(app: FastAPI, forms: Mapping[str, Callable[[ApiError], dict[str, Any]]]) -> None:
    """Register handlers for the errors that routes and the framework raise; any other exception is a 500.

    `forms` return the JSON body of an error at a path, and below it.
    """
    app.state.error_forms = forms
    for kind in (ApiError, EngineError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    return answer_error(request, error)


def answer_error(request: Request, error: Exception) -> Response:
    """Return the response to an error of a route or of the framework."""
    match error:
        case RequestValidationError():
            return error_response(_of_validation(error), request.scope)
        case HTTPException():
            return error_response(_of_framework(request, error), request.scope)
        case _:
            return error_response(request.app.state.service.to_api_error(error), request.scope)


def _of_validation(error: RequestValidationError) -> ApiError:
    """Return the API error for the first error of a validation."""
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None  # the first part is the location: query, body
    return ApiError(400, f"{param or 'the request'}: {first['msg']}", param=param)


def _of_framework(request: Request, error: HTTPException) -> ApiError:
    """Return the API error for an error of the router."""
    path = request.scope["path"][:MAX_QUOTED_CHARS]
    match error.status_code:
        case 404:
            return ApiError(404, f"there is nothing at {path}", code="unknown_url")
        case 405:
            allowed = _with_head((error.headers or {}).get("Allow", ""))
            message = f"{request.method} is not allowed at {path}, only {allowed}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
        case _:
            return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))


def _with_head(allowed: str) -> str:
    """Return the methods of an Allow header, with HEAD where GET is allowed."""
    methods = {method.strip() for method in allowed.split(",")}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
