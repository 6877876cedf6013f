"""Sessions of a server: pinned prefixes with their tokens and messages, which requests continue, and saved ones.

A session is changed by its own routes alone: a request that names one begins with its tokens, or its messages, and
leaves it as it is. So requests of one session may run at once, and each is the request that sends all of them.
"""

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request

from quire.core.checks import refuse, shown
from quire.core.errors import SessionError
from quire.core.images import PromptImage
from quire.core.outputs import PinnedPrefix
from quire.core.owner_labels import OPERATOR
from quire.core.sequence import Request as EngineRequest
from quire.engine.requests.image_prompts import image_key
from quire.engine.requests.input_processor import InputProcessor, TokenizedPrompt
from quire.engine.requests.saved_images import distinct_pixels, num_pixel_bytes, placed_images
from quire.engine.requests.saved_sessions import SavedSession, SavedSessions, check_blocks, check_name, saved_session
from quire.server.api.pinning import ComputedPin, pin_prompt
from quire.server.errors import ApiError
from quire.server.http.application import KEY_NUMBER, record_of
from quire.server.images.session_images import restored_messages, saved_messages
from quire.server.service import Service
from quire.text.conversation import Message

MAX_OPEN_STORES = 4     # saved sessions that are restored at once


@dataclass(slots=True, eq=False)
class Session:
    """The tokens of a pinned prefix, and the messages that they were made of; None: they were not made of messages."""

    id: str
    key_number: int
    model: str
    prompt: TokenizedPrompt
    messages: list[Message] | None      # an image is an ImagePart that is kept
    prefix: PinnedPrefix
    created: int
    slot: int = -1      # the number of an open session among those of its key; they are reused

    def continued(self, inputs: InputProcessor, prompt: Any) -> TokenizedPrompt:  # noqa: ANN401 (JSON)
        """Return the session's tokens, and those of a prompt behind them, which may be empty."""
        more = array("i") if prompt in ("", []) else inputs.tokenize(prompt, add_special_tokens=False).token_ids
        return self.prompt._replace(text=None, token_ids=self.prompt.token_ids + more)


class NamesSession(Protocol):
    """A body that may name a session."""

    session_id: str | None
    model: str | None
    cache_salt: str | None


class Sessions:
    """The sessions of a service. One ends with its pin: at its expiry, when it is deleted, or when the engine ends."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: dict[str, Session] = {}
        directory = None if service.engine_options is None else service.engine_options.kv_disk_dir
        self._saved = None if directory is None else SavedSessions(Path(directory))
        self._saving, self._num_saving = asyncio.Lock(), 0
        self._restoring = asyncio.Semaphore(MAX_OPEN_STORES)

    # --- open sessions ----------------------------------------------------------------------------------------------

    def of_key(self, key_number: int) -> list[Session]:
        """Return the open sessions of an API key; 0: those without a key. The oldest first."""
        pinned = self._service.client.pinned
        self._open = {each.id: each for each in self._open.values() if each.prefix.id in pinned}
        return [each for each in self._open.values() if each.key_number == key_number]

    def find(self, session_id: object, key_number: int) -> Session:
        """Return an open session of a key. SessionError if it has none of that id."""
        found = self._open.get(session_id) if isinstance(session_id, str) else None
        if found is None or found.key_number != key_number or found.prefix.id not in self._service.client.pinned:
            raise SessionError(f"there is no session {shown(session_id)}", "session_not_found")
        return found

    def named_by(self, request: Request, body: NamesSession) -> Session:
        """Return the session that a body names; the body gets its model and salt. Errors name the field."""
        service, found = self._service, self.find(body.session_id, request.scope[KEY_NUMBER])
        salt = found.prompt.cache_salt
        if body.cache_salt not in (None, salt):
            refuse("cache_salt", body.cache_salt, "left out, or that of the session")
        model = service.check_model(body.model or found.model)
        if service.adapter_of(model) != found.prompt.adapter:
            if body.model in (None, found.model):
                message = f"the adapter {shown(model)} of the session is no longer served as it was"
                raise ApiError(410, message, param="session_id", code="adapter_gone")
            refuse("model", body.model, f"left out, or {shown(found.model)}, that of the session")
        body.model, body.cache_salt = model, salt
        return found

    def messages_of(self, session: Session, messages: Sequence[Any], param: str = "messages") -> list[Any]:
        """Return a session's messages, and others behind them. Errors name the field."""
        if session.messages is None:
            message = f"session {shown(session.id)} was not made of messages: continue it by a completion"
            raise SessionError(message, "invalid_session")
        most = self._service.options.max_messages
        if len(session.messages) + len(messages) > most:
            held = len(session.messages)
            refuse(param, messages, f"at most {most} messages with the session's {held} (max_messages)")
        return [*session.messages, *messages]

    async def compute(
        self, request: Request, model: str, tokenize: Callable[[], TokenizedPrompt], weight: int,
        messages: list[Message] | None, ttl_s: float, *, restored: tuple[SavedSession, Path] | None = None,
    ) -> tuple[Session, ComputedPin]:  # fmt: skip
        """Compute the tokens of a session and pin them; return a session that is not open yet.

        Raises as `pin_prompt`. `restored`: a saved session, of which the blocks are loaded.
        """
        service, record = self._service, record_of(request.scope)
        key_number, prompts, asked = request.scope[KEY_NUMBER], list[TokenizedPrompt](), list[EngineRequest]()

        def tokenized() -> TokenizedPrompt:
            prompts.append(tokenize()._replace(key_number=key_number))
            return prompts[0]

        async def open_store(engine_request: EngineRequest) -> None:
            assert restored is not None
            saved, folder = restored
            asked.append(engine_request)
            blocks = await service.client.open_session(engine_request, folder, saved.num_blocks, saved.identity)
            check_blocks(blocks, f"the saved session {shown(saved.name)} cannot be restored", "session_unreadable")

        record.model, record.num_prompts = model, 1
        try:
            computed = await pin_prompt(
                request, service, tokenized, weight=weight, ttl_s=ttl_s, external_id=str(record.request_id),
                arrival_s=time.monotonic(), before=None if restored is None else open_store,
            )  # fmt: skip
        finally:
            for each in asked:
                service.client.close_session(each)
        record.prompt_tokens, record.cached_tokens = computed.prefix.num_tokens, computed.num_cached_tokens
        prompt = prompts[0]._replace(text=None)
        session_id = f"session-{uuid.uuid4().hex}"
        return Session(session_id, key_number, model, prompt, messages, computed.prefix, int(time.time())), computed

    def add(self, session: Session) -> None:
        """Open a session. It gets the lowest number that no other of its key has."""
        taken = {each.slot for each in self.of_key(session.key_number)}
        session.slot = next(slot for slot in count() if slot not in taken)
        self._open[session.id] = session

    def in_slot(self, slot: int, key_number: int) -> Session:
        """Return the open session of a key that has a number. SessionError if it has none."""
        found = next((each for each in self.of_key(key_number) if each.slot == slot), None)
        if found is None:
            raise SessionError(f"there is no session in slot {slot}", "session_not_found", param="id_slot")
        return found

    async def put_in_slot(self, session: Session, slot: int) -> None:
        """Open a session with a number, in the place of the one that has it."""
        before = next((each for each in self.of_key(session.key_number) if each.slot == slot), None)
        session.slot = slot
        self._open[session.id] = session
        if before is not None:
            await self.delete(before)

    async def replace(self, session: Session, computed: Session) -> None:
        """Give a session the tokens of another, which is not open; what it had pinned is unpinned."""
        before = session.prefix
        session.prompt, session.messages, session.prefix = computed.prompt, computed.messages, computed.prefix
        self._open[session.id] = session    # it may have expired meanwhile
        if before.id in self._service.client.pinned:
            await self._service.client.unpin_prefix(before.id, None)

    async def delete(self, session: Session) -> None:
        """End a session; its blocks are free on return."""
        self._open.pop(session.id, None)
        await self._service.client.unpin_prefix(session.prefix.id, None)

    # --- saved sessions ---------------------------------------------------------------------------------------------

    def _folders(self) -> SavedSessions:
        if self._saved is None:
            message = "sessions are saved where the server has a folder for keys and values (kv_disk_dir)"
            raise ApiError(400, message, code="unsupported_parameter")
        return self._saved

    def _owner_of(self, key_number: int) -> str:
        """Return the owner of saved sessions that a key stands for."""
        options = self._service.options
        key = options.operator_api_key if key_number == OPERATOR else None
        return self._folders().owner_of(options.api_key[key_number - 1] if key_number > 0 else key)

    async def save(self, session: Session, name: object) -> int:
        """Save a session under a name; return the bytes on the disk. A session that had the name is replaced.

        It goes on when the caller is cancelled: the engine writes into the folder.
        """
        saved, name = self._folders(), check_name(name)
        most = self._service.options.max_session_saves
        if self._num_saving >= most:
            message = (
                f"{self._num_saving} sessions are being saved already, and at most {most} may be at once "
                "(max_session_saves)"
            )
            retry = {"Retry-After": "1"}
            raise ApiError(429, message, type="rate_limit_error", code="server_overloaded", headers=retry)
        saving = asyncio.create_task(self._save_in_turn(saved, session, name), name="save a session")
        self._num_saving += 1
        saving.add_done_callback(self._record_saved)
        return await asyncio.shield(saving)

    async def _save_in_turn(self, saved: SavedSessions, session: Session, name: str) -> int:
        async with self._saving:    # else two might take the room of one
            return await self._save(saved, session, name)

    def _record_saved(self, saving: "asyncio.Task[int]") -> None:
        self._num_saving -= 1
        if not saving.cancelled():
            saving.exception()      # its caller may have gone

    async def _save(self, saved: SavedSessions, session: Session, name: str) -> int:
        service = self._service
        owner = await asyncio.to_thread(self._owner_of, session.key_number)
        pin = next((pin for pin in service.client.pinned.of_key(None) if pin.prefix.id == session.prefix.id), None)
        if pin is None:
            raise SessionError(f"session {shown(session.id)} has expired", "session_gone")
        await asyncio.to_thread(self._check_room, saved, session, owner, name)
        prompt, messages, model = session.prompt, session.messages, session.model
        plain = None if messages is None else saved_messages(messages, prompt.images)
        unfinished = await asyncio.to_thread(_begin, saved, owner)
        try:
            blocks = await service.client.save_session(pin.request_id, unfinished)
            check_blocks(blocks, f"session {shown(session.id)} was not saved", "session_not_saved")
            described = await asyncio.to_thread(
                saved_session, name, model, prompt, plain, blocks.identity, blocks.num_blocks
            )
            return await asyncio.to_thread(_commit, saved, unfinished, described, distinct_pixels(prompt.images))
        except BaseException:
            await asyncio.to_thread(saved.discard, unfinished)
            raise

    def _check_room(self, saved: SavedSessions, session: Session, owner: str, name: str) -> None:
        """Raise SessionError for one session, or some bytes, more than a key, or all keys, may have saved."""
        limits, ready = self._service.options, self._service.client.ready
        num_bytes = ready.kv_bytes_per_token * len(session.prompt.token_ids)
        num_bytes += sum(map(len, distinct_pixels(session.prompt.images)))
        for each, most, most_bytes, suffix in (
            (None, limits.max_saved_sessions, limits.max_saved_session_bytes, ""),
            (owner, limits.max_saved_sessions_per_key, limits.max_saved_session_bytes_per_key, "_per_key"),
        ):
            held, held_bytes = saved.use(each, owner, name)
            if held >= most:
                message = f"{held} sessions are saved already, and at most {most} may be (max_saved_sessions{suffix})"
                raise SessionError(message, "session_limit")
            if held_bytes + num_bytes > most_bytes:
                message = (
                    f"the session takes {num_bytes} bytes, and saved ones {held_bytes} already, of at most "
                    f"{most_bytes} (max_saved_session_bytes{suffix})"
                )
                raise SessionError(message, "session_limit")

    async def restore(
        self, request: Request, name: object, model: str | None, cache_salt: str | None, ttl_s: float
    ) -> tuple[Session, ComputedPin]:
        """Return a saved session, computed again from its keys and values; it is not open yet."""
        service, folders = self._service, self._folders()
        owner = await asyncio.to_thread(self._owner_of, request.scope[KEY_NUMBER])
        saved, folder = await asyncio.to_thread(folders.read, owner, check_name(name))
        model = service.check_model(saved.model if model is None and saved.adapter else model)
        adapter = service.adapter_of(model)
        async with self._restoring:
            images = await self._images_of(saved, folder, cache_salt)
            try:
                messages = restored_messages(saved.messages, images)
            except ValueError as error:
                message = f"the saved session {shown(name)} cannot be read: {error}"
                raise SessionError(message, "session_unreadable", param="name") from error

            def tokenize() -> TokenizedPrompt:
                prompt = TokenizedPrompt(
                    None, service.client.inputs.check_token_ids(saved.token_ids.tolist()), images=images
                )
                prompt = prompt.salted(cache_salt).adapted(adapter)
                saved.check_scope(prompt)
                return prompt

            return await self.compute(
                request, model, tokenize, saved.num_tokens, messages, ttl_s, restored=(saved, folder)
            )

    async def _images_of(self, saved: SavedSession, folder: Path, cache_salt: str | None) -> tuple[PromptImage, ...]:
        """Return the images of a saved session, numbered here."""
        prompts, most = saved.check_images(self._service.client.inputs.images), self._service.options
        if prompts is None:
            return ()
        if (num_bytes := num_pixel_bytes(saved.images)) > most.max_session_image_bytes:
            message = f"the images of the saved session {shown(saved.name)} take {num_bytes} bytes, at most "
            raise SessionError(f"{message}{most.max_session_image_bytes} (max_session_image_bytes)", "session_limit")
        prepared = await asyncio.to_thread(saved.read_images, folder)
        keys = await asyncio.to_thread(lambda: [image_key(each, cache_salt) for each in prepared])
        return placed_images(saved.images, [prompts.numbered(*each) for each in zip(prepared, keys, strict=True)])

    async def list_saved(self, key_number: int) -> list[tuple[SavedSession, int]]:
        """Return the saved sessions of a key, and their bytes on the disk; none where none can be saved."""
        if self._saved is None:
            return []
        owner = await asyncio.to_thread(self._owner_of, key_number)
        return await asyncio.to_thread(lambda saved: [*saved.each(owner)], self._saved)

    async def delete_saved(self, key_number: int, name: object) -> None:
        """Delete a saved session of a key."""
        saved, owner = self._folders(), await asyncio.to_thread(self._owner_of, key_number)
        await asyncio.to_thread(saved.delete, owner, check_name(name))


def _begin(saved: SavedSessions, owner: str) -> Path:
    try:
        return saved.begin(owner)
    except OSError as error:
        raise SessionError(f"the session was not saved: {error}", "session_not_saved") from error


def _commit(saved: SavedSessions, unfinished: Path, described: SavedSession, pixels: list[bytes]) -> int:
    try:
        return saved.commit(unfinished, described, pixels)
    except OSError as error:
        raise SessionError(f"the session was not saved: {error}", "session_not_saved") from error

