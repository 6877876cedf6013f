"""What clients are told when something is wrong: one form for every route, and one place that chooses the status."""

from typing import Any, NoReturn

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError, UnknownPrefixError
from quire.engine.wire import EngineDeadError

INVALID = "invalid_request_error"
RETRY_AFTER_S = 5  # where nothing is known of when it will be better


class ApiError(Exception):
    """An answer that is an error: a status of the contract with its type and code."""

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
        """The JSON that is sent, also as the last frame of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> NoReturn:
    """Refuse a request for what stands in one of its fields."""
    raise ApiError(400, message, param=param, code=code)


def unsupported(param: str, value: object) -> NoReturn:
    """Refuse a known parameter that does nothing here yet."""
    raise ApiError(400, f"{param} {shown(value)} is not supported yet", param=param, code="unsupported_parameter")


def engine_unhealthy(message: str) -> ApiError:
    """There is no engine that could answer."""
    return ApiError(503, message, type="server_error", code="engine_unhealthy", headers=_retry(RETRY_AFTER_S))


def shutting_down() -> ApiError:
    """The server finishes what it has and takes nothing more."""
    return ApiError(
        503, "the server is shutting down", type="server_error", code="shutting_down", headers=_retry(RETRY_AFTER_S)
    )


def overloaded(num_queued: int, limit: int, retry_after_s: int) -> ApiError:
    """Too many requests wait already."""
    return ApiError(
        429,
        f"{num_queued} requests wait already, and at most {limit} may (max_queued_requests)",
        type="rate_limit_error",
        code="server_overloaded",
        headers=_retry(retry_after_s),
    )


def too_many_connections(limit: int) -> ApiError:
    """There is no room for one more client, whatever it wants."""
    message = f"{limit} connections are open already, the most that this server holds"
    return ApiError(429, message, type="rate_limit_error", code="server_overloaded", headers=_retry(1))


def as_api_error(error: Exception) -> ApiError:
    """Return what a client is told of any error that a request ran into."""
    match error:
        case ApiError():
            return error
        case UnknownPrefixError():
            return ApiError(404, str(error), param=error.param, code=error.code)
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case EngineDeadError():
            return engine_unhealthy(str(error))
        case _:
            message = "the request failed inside the server; its log has the details"
            return ApiError(500, message, type="server_error", code="request_failed")


def _retry(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(max(1, seconds))}
