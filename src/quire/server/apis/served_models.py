"""Routes of the served model and its names."""

from typing import Any

from fastapi import APIRouter, Request, Response

from quire.server.api.http_responses import json_response
from quire.server.service import Service

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names of the model that is served, and of its LoRA adapters."""
    service: Service = request.app.state.service
    names = [*service.names, *(each.name for each in service.adapters.all)]
    return json_response({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
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
