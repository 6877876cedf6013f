"""Sessions of an `LLM`: pinned prefixes with their tokens, which prompts continue, and saved ones."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quire.core.checks import check_int, shown
from quire.core.errors import ConfigError, SessionError
from quire.core.images import PromptImage
from quire.core.lora import Adapter
from quire.core.outputs import PinnedPrefix
from quire.core.token_ids import PackedTokens
from quire.engine.offline_engine import OfflineEngine
from quire.engine.requests.image_prompts import image_key
from quire.engine.requests.input_processor import PreparedRequest, TokenizedPrompt, TokensPrompt
from quire.engine.requests.saved_images import distinct_pixels, images_before, placed_images
from quire.engine.requests.saved_sessions import SavedSession, SavedSessions, check_blocks, check_name, saved_session


@dataclass(slots=True, eq=False, repr=False)
class OfflineSession:
    """The tokens of a pinned prefix. `LLM.create_session` and `restore_session` make them.

    It is not changed by prompts that continue it, and stays until `delete`, or until its LLM closes or sleeps.
    """

    id: str
    _owner: "OfflineSessions" = field(repr=False)
    _prompt: TokenizedPrompt = field(repr=False)
    _prefix: PinnedPrefix = field(repr=False)

    def __repr__(self) -> str:
        """Return the id, and the number of tokens."""
        return f"<Session {self.id}: {self.num_tokens} tokens>"

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the session, in a new list."""
        return self._prompt.token_ids.tolist()

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self._prompt.token_ids)

    def prompt(self, prompt: str | list[int] = "") -> TokensPrompt:
        """Return a prompt for `LLM.generate`: the session's tokens and those of a text, or token ids, behind them."""
        whole = TokensPrompt(prompt_token_ids=self._owner.continued(self._prompt, prompt).tolist())
        if self._prompt.images:
            whole["images"] = self._prompt.images
        if self._prompt.cache_salt is not None:
            whole["cache_salt"] = self._prompt.cache_salt
        return whole

    def extend(self, prompt: str | list[int]) -> None:
        """Add the tokens of a text, or token ids, to the session, and pin them."""
        longer = self._prompt._replace(token_ids=self._owner.continued(self._prompt, prompt))
        before, self._prefix = self._prefix, self._owner.pin(longer)
        self._prompt = longer
        self._owner.unpin(before)

    def fork(self, at: int | None = None) -> "OfflineSession":
        """Return a session of the first `at` tokens, sharing their KV blocks; of all of them without `at`."""
        stop = self.num_tokens if at is None else check_int("at", at, 1, self.num_tokens)
        images = images_before(self._prompt.images, stop)
        return self._owner.create(self._prompt._replace(token_ids=self._prompt.token_ids[:stop], images=images))

    def save(self, name: str) -> None:
        """Save the session under `kv_disk_dir`, in the place of the one that had the name."""
        self._owner.save(self._prompt, self._prefix, name)

    def delete(self) -> None:
        """Let its blocks go; what was saved of it stays. UnknownPrefixError if it has ended."""
        self._owner.unpin(self._prefix)


class OfflineSessions:
    """The sessions of an engine. `finish`: computes a prepared request. `directory`: kv_disk_dir."""

    def __init__(
        self, engine: OfflineEngine, finish: Callable[[PreparedRequest], object], model: str, directory: str | None
    ) -> None:
        self._engine, self._finish, self._model = engine, finish, model
        self._saved = None if directory is None else SavedSessions(Path(directory))

    def create(self, prompt: TokenizedPrompt) -> OfflineSession:
        """Compute a session and pin it."""
        return OfflineSession(f"session-{uuid.uuid4().hex}", self, prompt._replace(text=None), self.pin(prompt))

    def continued(self, known: TokenizedPrompt, prompt: str | list[int]) -> PackedTokens:
        """Return known tokens and those of a prompt behind them, which may be empty."""
        if prompt in ("", []):
            return known.token_ids
        return known.token_ids + self._engine.inputs.tokenize(prompt, add_special_tokens=False).token_ids

    def pin(self, prompt: TokenizedPrompt, saved: tuple[SavedSession, Path] | None = None) -> PinnedPrefix:
        """Compute a prompt and pin it; its blocks are loaded from a saved session, if one is given."""
        engine = self._engine
        prepared = engine.inputs.prepare_pin(next(engine.pinned.request_ids), prompt)
        request = prepared.request
        try:
            if saved is not None:
                described, folder = saved
                blocks = engine.open_session(request, folder, described.num_blocks, described.identity)
                what = f"the saved session {shown(described.name)} cannot be restored"
                check_blocks(blocks, what, "session_unreadable")
            self._finish(prepared)
        except BaseException:
            engine.unpin(request.request_id)
            raise
        finally:
            if saved is not None:
                engine.close_session(request)
        return engine.pinned.add(request)

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Unpin a prefix and remove its id."""
        self._engine.unpin(self._engine.pinned.remove(prefix.id))

    def save(self, prompt: TokenizedPrompt, prefix: PinnedPrefix, name: str) -> None:
        """Save a pinned prefix with its tokens."""
        folders, name = self._folders, check_name(name)
        pin = next((pin for pin in self._engine.pinned.of_key(None) if pin.prefix.id == prefix.id), None)
        if pin is None:
            raise SessionError("the session has ended", "session_gone")
        unfinished = folders.begin(folders.owner_of(None))
        try:
            blocks = self._engine.save_session(pin.request_id, unfinished)
            check_blocks(blocks, "the session was not saved", "session_not_saved")
            described = saved_session(name, self._model, prompt, None, blocks.identity, blocks.num_blocks)
            folders.commit(unfinished, described, distinct_pixels(prompt.images))
        except BaseException:
            folders.discard(unfinished)
            raise

    def restore(self, name: str, cache_salt: str | None, adapter: Adapter | None) -> OfflineSession:
        """Return a saved session, with blocks that are loaded and not computed."""
        saved, folder = self._folders.read(self._folders.owner_of(None), check_name(name))
        tokens = self._engine.inputs.check_token_ids(saved.token_ids.tolist())
        prompt = TokenizedPrompt(None, tokens, cache_salt, 0, adapter)
        saved.check_scope(prompt)
        prompt = prompt._replace(images=self._images_of(saved, folder))
        return OfflineSession(f"session-{uuid.uuid4().hex}", self, prompt, self.pin(prompt, (saved, folder)))

    def _images_of(self, saved: SavedSession, folder: Path) -> tuple[PromptImage, ...]:
        """Return the images of a saved session, numbered here."""
        prompts = saved.check_images(self._engine.inputs.images)
        if prompts is None:
            return ()
        prepared = saved.read_images(folder)
        return placed_images(saved.images, [prompts.numbered(each, image_key(each)) for each in prepared])

    def names(self) -> list[str]:
        """Return the names of the saved sessions that can be read."""
        return [saved.name for saved, _ in self._folders.each(self._folders.owner_of(None))]

    def delete_saved(self, name: str) -> None:
        """Delete a saved session."""
        self._folders.delete(self._folders.owner_of(None), check_name(name))

    @property
    def _folders(self) -> SavedSessions:
        if self._saved is None:
            raise ConfigError("sessions are saved with LLM(kv_disk_dir=...)")
        return self._saved

