"""Routes of the server: which a service has, and an /openapi.json with the form of errors and the bounds."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, FastAPI

from quire.core.version import __version__
from quire.server.api.request_bodies import MAX_HTTP_SEED, titled
from quire.server.api.sessions import Sessions
from quire.server.apis import (
    forwarding,
    prefix_routes,
    profile_routes,
    served_names,
    session_routes,
    sleep_routes,
    system,
    tokenization,
)
from quire.server.apis.completions import completion_routes
from quire.server.apis.embeddings import embedding_routes
from quire.server.apis.messages import messages_routes
from quire.server.apis.messages.cache_control import CachedPrefixes
from quire.server.apis.messages.messages_bodies import error_body
from quire.server.apis.responses import responses_routes
from quire.server.errors import handle_errors
from quire.server.http.application import Application
from quire.server.inspect import debug_routes, explain_routes
from quire.server.options import MAX_ELEMENTS
from quire.server.pages import docs_page, page_routes
from quire.server.pages.field_descriptions import describe_fields
from quire.server.service import Service

_ERROR = {
    "type": "object",
    "description": "The error.",
    "properties": {
        "message": {"type": "string", "description": "What is wrong, with the value and the limit."},
        "type": {"type": "string", "description": "Kind of the error, as OpenAI names it."},
        "param": {"type": ["string", "null"], "description": "Field of the body that is wrong, if it is one."},
        "code": {"type": ["string", "null"], "description": "Name of the error, for programs."},
    },
    "required": ["message", "type", "param", "code"],
    "additionalProperties": False,
}
_ERROR_BODY = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"], "additionalProperties": False}
_CONTENT = {"application/json": {"schema": _ERROR_BODY}}

# Statuses of every route; without them FastAPI documents its own 422, which no route returns.
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "the request was refused", "content": _CONTENT},
    "5XX": {"description": "the request failed", "content": _CONTENT},
}


def create_app(service: Service) -> FastAPI:
    """Return the application of a service; routes find it as `request.app.state.service`."""
    app = Application(
        service, title="Quire", version=__version__, responses=_ERRORS,
        servers=[{"url": service.options.root_path}] if service.options.root_path else None,
    )  # fmt: skip
    app.state.cached_prefixes, app.state.sessions = CachedPrefixes(), Sessions(service)
    for router in _routers(service):
        app.include_router(router)
    handle_errors(app, {messages_routes.PATH: error_body})
    _document_fields(app, service)
    return app


def _routers(service: Service) -> Iterator[APIRouter]:
    """Yield the routes that a server has by its options."""
    options = service.options
    for module in (
        page_routes, docs_page, system, completion_routes, tokenization, served_names, forwarding, messages_routes,
        responses_routes, embedding_routes, explain_routes,
    ):  # fmt: skip
        yield module.router
    if options.enable_tokenizer_info_endpoint:
        yield tokenization.settings_router
    if options.max_pinned_prefixes:
        yield prefix_routes.router
        yield session_routes.router
    if options.allow_runtime_lora:
        yield served_names.adapter_router
    if service.can_sleep:
        yield sleep_routes.router
    if options.profile_dir is not None:
        yield profile_routes.router
    if options.enable_debug:
        yield debug_routes.router


def _document_fields(app: FastAPI, service: Service) -> None:
    """Add the bounds of a service, and descriptions of fields, to the application's schema."""
    describe_routes = app.openapi

    def whole() -> dict[str, Any]:
        if app.openapi_schema is None:
            for path, properties in _bodies(describe_routes()):
                _add_bounds(properties, service)
                describe_fields(path, properties)
        assert app.openapi_schema is not None, "FastAPI caches the schema"
        return app.openapi_schema

    app.openapi = whole  # type: ignore[method-assign]


def _bodies(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fill in the schema of each request body, and yield its properties with the path of its route."""
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                content["schema"] = titled(content["schema"]["title"])
                yield path, content["schema"].get("properties", {})


def _add_bounds(properties: dict[str, Any], service: Service) -> None:
    options, inputs = service.options, service.client.inputs
    bounds = {"n": {"maximum": options.max_n}, "cache_salt": {"maxLength": options.max_salt_chars}}
    bounds |= {field: {"maximum": inputs.max_logprobs} for field in ("logprobs", "top_logprobs", "prompt_logprobs")}
    bounds |= {field: {"maxItems": getattr(options, limit)} for field, limit in MAX_ELEMENTS.items()}
    bounds["seed"] = {"maximum": MAX_HTTP_SEED}
    bounds["logit_bias"] = {"maxProperties": options.max_logit_bias}
    kinds = {"maximum": "integer", "maxLength": "string", "maxItems": "array", "maxProperties": "object"}
    for field in bounds.keys() & properties.keys():
        for kind in properties[field].get("anyOf", [properties[field]]):
            kind |= {name: bound for name, bound in bounds[field].items() if kind.get("type") == kinds[name]}
