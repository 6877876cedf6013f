"""Routes of sessions: create, extend, fork, save, restore, list, delete; and llama.cpp's of slots."""

import re
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from quire.core.checks import check_float, check_int, refuse
from quire.core.errors import SessionError
from quire.core.images import cache_keys
from quire.engine.requests.input_processor import TokenizedPrompt, check_cache_salt
from quire.engine.requests.saved_images import images_before
from quire.engine.requests.saved_sessions import SavedSession
from quire.server.api.chat import numbered_images, rendered
from quire.server.api.http_responses import json_response
from quire.server.api.pinning import ComputedPin
from quire.server.api.request_bodies import read_body, request_body
from quire.server.api.sessions import Session, Sessions
from quire.server.apis.completions.completion_bodies import (
    MAX_TTL_S,
    SessionBody,
    SessionExtendBody,
    SessionForkBody,
    SessionSaveBody,
    SlotBody,
)
from quire.server.apis.completions.completion_routes import conversation_of
from quire.server.errors import ApiError, invalid
from quire.server.history import PastRequest
from quire.server.http.application import CLIENT_ID, KEY_NUMBER
from quire.server.images.session_images import check_messages, check_pixels, kept_messages
from quire.server.service import Service
from quire.text.tools import check_tools

router = APIRouter(tags=["sessions"])

_SessionId = Annotated[str, Path(description="id of the session")]
_Name = Annotated[str, Path(description="name of the saved session")]


@router.post("/v1/sessions", openapi_extra=request_body(SessionBody))
async def create_session(request: Request) -> Response:
    """Compute a session of a prompt, of messages, of an answer or of a saved session, and keep it."""
    service, sessions = _of(request)
    body = await read_body(request, SessionBody)
    _check_one(body, ("prompt", "messages", "answer_id", "restore"))
    ttl_s, salt = _ttl_s(service, body.ttl), check_cache_salt(body.cache_salt, service.options.max_salt_chars)
    if body.restore is not None:
        session, computed = await sessions.restore(request, body.restore, body.model, salt, ttl_s)
        service.metrics.session_moved("restore")
    elif body.answer_id is not None:
        past, prompt = _answer(request, body)
        for name, own in (("model", _model_of(service, past)), ("cache_salt", past.prompt.cache_salt)):
            if (asked := getattr(body, name)) not in (None, own):
                refuse(name, asked, "left out, or that of the answer")
        model = _model_of(service, past)
        session, computed = await sessions.compute(request, model, lambda: prompt, 1, None, ttl_s)
    else:
        model = service.check_model(body.model)
        empty = TokenizedPrompt(None, array("i"), salt, 0, service.adapter_of(model))
        session, computed = await _compute(request, model, empty, [], body, ttl_s)
    sessions.add(session)
    if body.restore is None:
        service.metrics.session_moved("create")
    return json_response(_described(session, computed))


@router.post("/v1/sessions/{session_id}/extend", openapi_extra=request_body(SessionExtendBody))
async def extend_session(request: Request, session_id: _SessionId) -> Response:
    """Add a prompt, messages, or the tokens of an answer that continues it, to a session."""
    service, sessions = _of(request)
    session = sessions.find(session_id, request.scope[KEY_NUMBER])
    body = await read_body(request, SessionExtendBody)
    _check_one(body, ("prompt", "messages", "answer_id"))
    ttl_s = _ttl_s(service, body.ttl)
    if body.answer_id is not None:
        known = session.prompt
        past, prompt = _answer(request, body, known)
        is_continued = prompt.token_ids[: len(known.token_ids)] == known.token_ids
        if not is_continued or past.prompt.cache_salt != known.cache_salt or past.prompt.adapter != known.adapter:
            invalid("answer_id: the answer does not continue the session", param="answer_id")
        new, computed = await sessions.compute(request, session.model, lambda: prompt, 1, None, ttl_s)
    else:
        before = [] if body.messages is None else sessions.messages_of(session, [])
        new, computed = await _compute(request, session.model, session.prompt, before, body, ttl_s)
    await sessions.replace(session, new)
    service.metrics.session_moved("extend")
    return json_response(_described(session, computed))


@router.post("/v1/sessions/{session_id}/fork", openapi_extra=request_body(SessionForkBody))
async def fork_session(request: Request, session_id: _SessionId) -> Response:
    """Make a session of the first tokens of another, sharing its KV blocks."""
    service, sessions = _of(request)
    session = sessions.find(session_id, request.scope[KEY_NUMBER])
    body = await read_body(request, SessionForkBody)
    num_tokens = len(session.prompt.token_ids)
    at = num_tokens if body.at is None else check_int("at", body.at, 1, num_tokens)
    known = session.prompt
    prompt = known._replace(token_ids=known.token_ids[:at], images=images_before(known.images, at))
    messages = session.messages if at == num_tokens else None
    forked, computed = await sessions.compute(
        request, session.model, lambda: prompt, 1, messages, _ttl_s(service, body.ttl)
    )
    sessions.add(forked)
    service.metrics.session_moved("fork")
    return json_response(_described(forked, computed))


@router.post("/v1/sessions/{session_id}/save", openapi_extra=request_body(SessionSaveBody))
async def save_session(request: Request, session_id: _SessionId) -> Response:
    """Save a session on the disk, in the place of the one that had the name."""
    service, sessions = _of(request)
    session = sessions.find(session_id, request.scope[KEY_NUMBER])
    body = await read_body(request, SessionSaveBody)
    num_tokens = len(session.prompt.token_ids)
    num_bytes = await service.responses.run(sessions.save(session, body.name), request.scope, request.receive)
    service.metrics.session_moved("save")
    return json_response({
        "object": "session.saved", "id": session.id, "name": body.name, "num_tokens": num_tokens, "bytes": num_bytes,
    })


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> Response:
    """List the sessions of the client's key, oldest first, and its saved ones by name."""
    _, sessions = _of(request)
    key_number = request.scope[KEY_NUMBER]
    saved = await sessions.list_saved(key_number)
    data = [_described(session) for session in sessions.of_key(key_number)]
    return json_response({"object": "list", "data": data, "saved": [_described_saved(*each) for each in saved]})


@router.get("/v1/sessions/{session_id}")
async def get_session(request: Request, session_id: _SessionId) -> Response:
    """Describe a session."""
    _, sessions = _of(request)
    return json_response(_described(sessions.find(session_id, request.scope[KEY_NUMBER])))


@router.delete("/v1/sessions/{session_id}")
async def delete_session(request: Request, session_id: _SessionId) -> Response:
    """End a session; requests that continue it go on, and what was saved of it stays."""
    service, sessions = _of(request)
    session = sessions.find(session_id, request.scope[KEY_NUMBER])
    await service.responses.run(sessions.delete(session), request.scope, request.receive)
    return json_response({"id": session_id, "object": "session.deleted", "deleted": True})


@router.delete("/v1/sessions/saved/{name}")
async def delete_saved_session(request: Request, name: _Name) -> Response:
    """Delete a saved session."""
    _, sessions = _of(request)
    await sessions.delete_saved(request.scope[KEY_NUMBER], name)
    return json_response({"name": name, "object": "session.deleted", "deleted": True})


@router.post("/slots/{id_slot}", openapi_extra=request_body(SlotBody))
async def move_slot(
    request: Request,
    id_slot: Annotated[str, Path(description="number of the session among those of the key: its id_slot")],
    action: Annotated[str, Query(description="save, restore or erase", examples=["save"])] = "",
) -> Response:
    """Save a session, restore one or end one, by its number, as llama.cpp's server does."""
    service, sessions = _of(request)
    started_s, key_number = time.monotonic(), request.scope[KEY_NUMBER]
    most = service.options.max_pinned_prefixes - 1
    slot = check_int("id_slot", int(id_slot) if re.fullmatch("[0-9]{1,6}", id_slot) else id_slot, 0, most)
    if action not in ("save", "restore", "erase"):
        refuse("action", action, "save, restore or erase")
    body = await read_body(request, SlotBody)
    if action == "erase":
        session = sessions.in_slot(slot, key_number)
        await service.responses.run(sessions.delete(session), request.scope, request.receive)
        return json_response({"id_slot": slot, "n_erased": len(session.prompt.token_ids)})
    if body.filename is None:
        invalid(f"filename is missing: {action} needs the name of a saved session", param="filename")
    described: dict[str, Any] = {"id_slot": slot, "filename": body.filename}
    if action == "save":
        session = sessions.in_slot(slot, key_number)
        saving = sessions.save(session, body.filename)
        num_bytes = await service.responses.run(saving, request.scope, request.receive)
        service.metrics.session_moved("save")
        described |= {"n_saved": len(session.prompt.token_ids), "n_written": num_bytes}
    else:
        salt = check_cache_salt(body.cache_salt, service.options.max_salt_chars)
        session, computed = await sessions.restore(request, body.filename, body.model, salt, service.options.pin_ttl)
        await sessions.put_in_slot(session, slot)
        service.metrics.session_moved("restore")
        num_read = computed.num_disk_tokens * service.client.ready.kv_bytes_per_token
        described |= {"n_restored": len(session.prompt.token_ids), "n_read": num_read}
    taken_ms = 1000 * (time.monotonic() - started_s)
    return json_response(described | {"timings": {f"{action}_ms": round(taken_ms, 3)}})


def _of(request: Request) -> tuple[Service, Sessions]:
    state = request.app.state
    return state.service, state.sessions


def _check_one(body: SessionExtendBody, names: Sequence[str]) -> None:
    """Raise ApiError unless a body has exactly one of some fields."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        found = f"got {' and '.join(given)}" if given else "got none"
        invalid(f"give exactly one of {', '.join(names)}, {found}", param=given[-1] if given else names[0])


def _ttl_s(service: Service, asked: float | None) -> float:
    """Return the seconds until a session ends: at most pin_ttl, unless that is 0. 0: it does not end by itself."""
    longest = service.options.pin_ttl
    if asked is None:
        return longest
    ttl_s = check_float("ttl", asked, 0.0, MAX_TTL_S)
    if ttl_s <= 0:
        refuse("ttl", asked, "more than 0 seconds")
    return min(ttl_s, longest or ttl_s)


async def _compute(
    request: Request, model: str, before: TokenizedPrompt, messages: list[Any], body: SessionExtendBody,
    ttl_s: float,
) -> tuple[Session, ComputedPin]:  # fmt: skip
    """Compute a session of a prompt behind tokens, or of messages behind others."""
    service, sessions = _of(request)
    inputs = service.client.inputs
    if body.messages is None:
        if not isinstance(body.prompt, str | list):
            refuse("prompt", body.prompt, "text or a list of token ids")
        adds_special = not before.token_ids if body.add_special_tokens is None else body.add_special_tokens

        def of_prompt() -> TokenizedPrompt:
            new = inputs.tokenize(body.prompt, add_special_tokens=adds_special).token_ids
            return before._replace(token_ids=before.token_ids + new)

        return await sessions.compute(request, model, of_prompt, len(body.prompt), None, ttl_s)
    tools = [] if body.tools is None else check_tools(body.tools)
    conversation = conversation_of(service, body, body.messages, tools)
    whole = [*messages, *conversation.messages]
    check_messages(whole, service.options)
    if len(whole) > service.options.max_messages:
        refuse("messages", whole, f"at most {service.options.max_messages} of them (max_messages)")
    ends_open = bool(body.add_generation_prompt)
    conversation = replace(conversation, messages=whole, add_generation_prompt=ends_open)
    client_id = request.scope[CLIENT_ID]
    with service.admit(1, param="messages", client_id=client_id) as admitted:
        text, images = await rendered(service, conversation, client_id)
        numbered = await numbered_images(service, images, admitted, client_id, before.cache_salt)
        check_pixels(numbered, service.options)

    adds = conversation.adds_special_tokens

    def of_messages() -> TokenizedPrompt:
        new = inputs.tokenize_rendered(text, add_special_tokens=adds, images=numbered)
        return before._replace(token_ids=new.token_ids, images=new.images)

    return await sessions.compute(request, model, of_messages, len(text), kept_messages(whole, numbered), ttl_s)


def _answer(
    request: Request, body: SessionExtendBody, known: TokenizedPrompt | None = None
) -> tuple[PastRequest, TokenizedPrompt]:
    """Return the request of an answer, and its prompt and tokens. SessionError 410 if it is not kept (any more).

    `known`: of a session, which has the pixels of its images.
    """
    service: Service = request.app.state.service
    try:
        requests = service.history.find(str(body.answer_id), request.scope[KEY_NUMBER])
    except ApiError as error:
        raise SessionError(f"answer_id: {error.message}", "answer_gone", param="answer_id") from error
    past = requests[check_int("prompt_index", body.prompt_index or 0, 0, len(requests) - 1)]
    index = check_int("index", body.index or 0, 0, past.num_branches - 1)
    tokens = array("i", past.known_tokens(index, len(past.branches.get(index, ()))))
    images = () if known is None else known.images
    if known is not None and images:
        own = cache_keys(known.token_ids, images)
        if tokens[: len(own)] == own:
            tokens[: len(own)] = known.token_ids
    if past.has_images and min(tokens) < 0:
        invalid("answer_id: the answer is to images, and pixels are not kept", param="answer_id")
    return past, past.prompt._replace(token_ids=tokens, images=images)


def _model_of(service: Service, past: PastRequest) -> str:
    """Return the name of the model that has given an answer."""
    adapter = past.prompt.adapter
    if adapter is None:
        return service.names[0]
    if service.adapter_of(adapter.name) != adapter:
        message = f"the adapter {adapter.name!r} of the answer is no longer served as it was"
        raise ApiError(410, message, param="answer_id", code="adapter_gone")
    return adapter.name


def _described(session: Session, computed: ComputedPin | None = None) -> dict[str, Any]:
    described = {
        "id": session.id, "object": "session", "id_slot": session.slot, "model": session.model,
        "created": session.created, "expires": session.prefix.expires, "num_tokens": len(session.prompt.token_ids),
        "num_messages": None if session.messages is None else len(session.messages),
    }
    if computed is not None:
        described |= {
            "num_cached_tokens": computed.num_cached_tokens, "num_disk_tokens": computed.num_disk_tokens,
        }
    return described


def _described_saved(saved: SavedSession, num_bytes: int) -> dict[str, Any]:
    return {
        "name": saved.name, "model": saved.model, "created": saved.created, "num_tokens": saved.num_tokens,
        "bytes": num_bytes,
    }
