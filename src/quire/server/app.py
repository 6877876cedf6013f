"""Routes of the server: which a service has, and an /openapi.json with the form of errors and the bounds."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from quire.core.optional_package import absent_package
from quire.core.version import __version__
from quire.server.api.bodies import MAX_HTTP_SEED
from quire.server.errors import handle_errors
from quire.server.http.application import Application
from quire.server.options import MAX_ELEMENTS
from quire.server.routes import (
    adapters,
    completions,
    docs,
    forwarding,
    models,
    prefixes,
    system,
    tokenization,
    tokenizer_info,
)
from quire.server.service import Service

try:
    from quire.server.watch.inspection import install_inspection
except ModuleNotFoundError as error:
    if absent_package(error, "quire.server.watch") is None:
        raise
    install_inspection = None  # type: ignore[assignment]  # optional: without it its routes answer 404

try:
    from quire.server.tools.output_format import served_formats
except ModuleNotFoundError as error:
    rooms = ("quire.server.tools", "quire.server.call_grammars", "quire.grammar_writing")
    if absent_package(error, *rooms) is None:
        raise
    served_formats = None  # type: ignore[assignment]  # optional: without it outputs are content, and tools are refused

try:
    from quire.server.messages.routes import install_messages
except ModuleNotFoundError as error:
    if absent_package(error, "quire.server.messages") is None:
        raise
    install_messages = None  # type: ignore[assignment]  # optional: without it its routes answer 404

try:
    import quire.grammar_writing.writer  # noqa: F401 (the process of the checks writes grammars by it)
    from quire.server.structured.checker import output_constraints
except ModuleNotFoundError as error:
    if absent_package(error, "quire.server.structured", "quire.grammar_writing") is None:
        raise
    output_constraints = None  # type: ignore[assignment]  # optional: without it requests with grammars are refused

try:
    from quire.server.responses.routes import router as responses_router
except ModuleNotFoundError as error:
    if absent_package(error, "quire.server.responses") is None:
        raise
    responses_router = None  # type: ignore[assignment]  # optional: without it /v1/responses answers 404

try:
    from quire.server.embeddings.routes import router as embedding_routes
except ModuleNotFoundError as error:
    if absent_package(error, "quire.server.embeddings", "quire.engine.pooling") is None:
        raise
    embedding_routes = None  # type: ignore[assignment]  # optional: without it its routes answer 404

_NULLABLE_STRING = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}}
    | dict.fromkeys(("param", "code"), _NULLABLE_STRING),
    "required": ["message", "type", "param", "code"],
    "additionalProperties": False,
}
_ERROR_BODY = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"], "additionalProperties": False}
_CONTENT = {"application/json": {"schema": _ERROR_BODY}}

# Of every route; without them FastAPI documents its own 422, which no route returns.
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
    if served_formats is not None:
        service.formats = served_formats(service.client.tokenizer, service.options, service.templates)
    if output_constraints is not None:
        service.constraints = output_constraints(service.options)
    modules = [system, completions, tokenization, models, forwarding, docs]
    if service.options.enable_tokenizer_info_endpoint:
        modules.append(tokenizer_info)
    if service.options.max_pinned_prefixes:
        modules.append(prefixes)
    if service.options.allow_runtime_lora:
        modules.append(adapters)
    for module in modules:
        app.include_router(module.router)
    if responses_router is not None:
        app.include_router(responses_router)
    if embedding_routes is not None:
        app.include_router(embedding_routes)
    if install_inspection is not None:
        install_inspection(app, service)
    handle_errors(app)
    if install_messages is not None:
        install_messages(app)
    _document_bounds(app, service)
    return app


def _document_bounds(app: FastAPI, service: Service) -> None:
    """Add the bounds of a service to the application's schema."""
    describe_routes = app.openapi

    def whole() -> dict[str, Any]:
        if app.openapi_schema is None:
            for properties in _bodies(describe_routes()):
                _add_bounds(properties, service)
        assert app.openapi_schema is not None, "FastAPI caches the schema"
        return app.openapi_schema

    app.openapi = whole  # type: ignore[method-assign]


def _bodies(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the properties of each request body."""
    for methods in schema["paths"].values():
        for operation in methods.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                yield content["schema"].get("properties", {})


def _add_bounds(properties: dict[str, Any], service: Service) -> None:
    options, inputs = service.options, service.client.inputs
    bounds = {"n": {"maximum": options.max_n}, "cache_salt": {"maxLength": options.max_salt_chars}}
    bounds |= {field: {"maximum": inputs.max_logprobs} for field in ("logprobs", "top_logprobs", "prompt_logprobs")}
    bounds |= {field: {"maxItems": getattr(options, limit)} for field, limit in MAX_ELEMENTS.items()}
    bounds["seed"] = {"maximum": MAX_HTTP_SEED}  # FastAPI rounds it to a float, one too high
    bounds["logit_bias"] = {"maxProperties": options.max_logit_bias}
    kinds = {"maximum": "integer", "maxLength": "string", "maxItems": "array", "maxProperties": "object"}
    for field in bounds.keys() & properties.keys():
        for kind in properties[field].get("anyOf", [properties[field]]):
            kind |= {name: bound for name, bound in bounds[field].items() if kind.get("type") == kinds[name]}
