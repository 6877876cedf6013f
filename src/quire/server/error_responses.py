"""Errors as HTTP: whatever goes wrong on any route leaves in the contract's one form."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from quire.core.errors import EngineError
from quire.server.errors import ApiError, as_api_error

MAX_QUOTED_CHARS = 200  # of a URL, in an error


def error_response(error: ApiError) -> Response:
    """Return the response that carries an error."""
    return JSONResponse(error.body, error.status, error.headers)


def handle_errors(app: FastAPI) -> None:
    """Answer every error that a route raises on purpose, and those of the framework. Others are nobody's purpose."""
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(EngineError, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(HTTPException, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    match error:
        case RequestValidationError():
            return error_response(_of_validation(error))
        case HTTPException():
            return error_response(_of_framework(request, error))
        case _:
            return error_response(as_api_error(error))


def _of_validation(error: RequestValidationError) -> ApiError:
    """Return what FastAPI's first finding comes to."""
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None  # the first part says where: query, body
    return ApiError(400, f"{param or 'the request'}: {first['msg']}", param=param)


def _of_framework(request: Request, error: HTTPException) -> ApiError:
    """Return what the router's own errors come to."""
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
    """Return the methods of an Allow header; whatever can be read can be asked for its head."""
    methods = {method.strip() for method in allowed.split(",")}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
