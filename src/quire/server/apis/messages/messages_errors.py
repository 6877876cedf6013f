"""Form of errors of Anthropic's API, for all that is answered at its routes."""

from typing import Any

from quire.server.errors import ApiError

# By status; 529 is Anthropic's own, which clients retry as they retry 503.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_BODY = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "error"],
    "additionalProperties": False,
}
_CONTENT = {"application/json": {"schema": _BODY}}
ERRORS: dict[int | str, dict[str, Any]] = {  # statuses of every route, for openapi.json
    "4XX": {"description": "the request was refused", "content": _CONTENT},
    "5XX": {"description": "the request failed", "content": _CONTENT},
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
