"""Routes of the served names: the model's own, and LoRA adapters, loaded from folders below `lora_root`."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from quire.core.checks import check_text
from quire.core.errors import ModelError
from quire.core.lora import MAX_NAME_CHARS, MAX_PATH_CHARS
from quire.server.adapter_names import path_below
from quire.server.api.http_responses import json_response
from quire.server.api.request_bodies import documented_as, read_body, request_body
from quire.server.apis.completions.completion_bodies import OpenAIBody
from quire.server.errors import ApiError, invalid
from quire.server.http.application import check_operator
from quire.server.service import Service

router = APIRouter()
adapter_router = APIRouter(tags=["adapters"])

_TEXT = {"type": "string"}


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names of the model that is served, and of its LoRA adapters."""
    service: Service = request.app.state.service
    names = [*service.names, *(each.name for each in service.adapters.all)]
    return json_response({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(
    request: Request,
    model_id: Annotated[str, Path(description="name of the model or of an adapter")],
) -> Response:
    """Describe a model."""
    service: Service = request.app.state.service
    return json_response(_model(service, service.check_model(model_id)))


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapters.find(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created if adapter is None else adapter.created,
        "owned_by": "quire",
        "root": (service.model_source or service.names[0]) if adapter is None else adapter.adapter.folder,
        "parent": None if adapter is None else adapter.parent,
        "max_model_len": service.client.ready.limits.max_model_len,
        "permission": [_permission(service, name)],
    }


def _permission(service: Service, name: str) -> dict[str, Any]:
    """Return a permission as OpenAI's API once had it; clients of vLLM may read it."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": service.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


class LoadAdapterBody(OpenAIBody):
    """The body of /v1/load_lora_adapter."""

    lora_name: Annotated[Any, documented_as(_TEXT)]
    lora_path: Annotated[Any, documented_as(_TEXT)]
    load_inplace: Annotated[bool | None, documented_as({"type": "boolean"})] = None


class UnloadAdapterBody(OpenAIBody):
    """The body of /v1/unload_lora_adapter."""

    lora_name: Annotated[Any, documented_as(_TEXT)]
    lora_int_id: Annotated[Any, documented_as({"type": "integer"})] = None


@adapter_router.post("/v1/load_lora_adapter", openapi_extra=request_body(LoadAdapterBody))
async def load_lora_adapter(request: Request) -> Response:
    """Read an adapter and serve it under a name."""
    service = _service(request)
    body = await read_body(request, LoadAdapterBody)
    name = check_text("lora_name", body.lora_name, MAX_NAME_CHARS)
    path = check_text("lora_path", body.lora_path, MAX_PATH_CHARS)
    if not name.isprintable():
        invalid("lora_name must not have control characters", param="lora_name")
    _check_name(service, name, replaces=bool(body.load_inplace))
    try:
        folder = await asyncio.to_thread(path_below, service.options.lora_root or "", path)
    except (ValueError, OSError) as error:
        raise ApiError(404, str(error), param="lora_path", code="adapter_not_found") from error
    try:
        adapter = await service.client.read_adapter(str(folder))
    except ModelError as error:
        invalid(str(error), param="lora_path")
    _check_name(service, name, replaces=bool(body.load_inplace))   # another call may have been faster
    service.adapters.add(name, adapter)
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


@adapter_router.post("/v1/unload_lora_adapter", openapi_extra=request_body(UnloadAdapterBody))
async def unload_lora_adapter(request: Request) -> Response:
    """Remove the name of an adapter; requests that were sent keep it."""
    service = _service(request)
    body = await read_body(request, UnloadAdapterBody)
    name = check_text("lora_name", body.lora_name, MAX_NAME_CHARS)
    if not service.adapters.remove(name):
        raise ApiError(404, f"there is no LoRA adapter {name!r}", param="lora_name", code="adapter_not_found")
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


def _service(request: Request) -> Service:
    """Return the service. ApiError 403 where there is an operator's key, and the request has another one."""
    check_operator(request, "adapters are loaded")
    service: Service = request.app.state.service
    return service


def _check_name(service: Service, name: str, *, replaces: bool) -> None:
    if replaces and service.adapters.find(name) is not None:
        return
    if (reason := service.adapters.reason_against(name)) is not None:
        invalid(reason, param="lora_name")
