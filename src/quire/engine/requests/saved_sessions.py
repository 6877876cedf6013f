"""Saved sessions of a KV disk directory: their names, owners and tokens, without a model.

    DIR/sessions/<owner>/<name>/  session.json, images (pixels), and the files of a KV store: quire.execution.kv_folder

A session is written into a folder beside the others and renamed when it is whole, so a name always has one version. The
owner is a digest of an API key under a key of the directory. All methods wait for the disk.
"""

import base64
import binascii
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import tarfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.cache.prefix_tree import scope_text
from quire.core.checks import shown
from quire.core.errors import SessionError
from quire.core.image_processing import PreparedImage
from quire.core.pooling import Scope
from quire.core.token_ids import PackedTokens
from quire.engine.messages import SessionBlocks
from quire.engine.requests.image_prompts import ImagePrompts
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.engine.requests.saved_images import PIXELS, SavedImage, read_images, saved_images
from quire.execution.kv_folder import FILES, private_folder

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
HEADER = "session.json"
SESSION_FILES = (HEADER, PIXELS, *FILES)
MAX_HEADER_BYTES = 256 << 20
_KEY_BYTES = 32
_OWNER_CHARS = 40       # unlike the 64 of an identity: see kv_folder
_UNFINISHED = ".new-"   # no name begins so: see `check_name`
_PROCESS = secrets.token_hex(8)     # part of the names of unfinished folders, as numbers of processes come again


@dataclass(frozen=True, slots=True)
class SavedSession:
    """Content of `session.json`: a session without its keys and values."""

    name: str
    model: str             # name of the model that was asked for
    created: int           # seconds since 1970
    num_tokens: int
    tokens: str            # 4 bytes each, little-endian, in base64
    adapter: str           # digest of the LoRA adapter; empty: none
    nonce: str             # random, so that equal salts do not show
    scope: str             # HMAC-SHA-256 of the salt and the adapter under the nonce
    identity: str          # `KVIdentity.as_json` of the engine that has computed it
    num_blocks: int        # full blocks in the store
    messages: list[dict[str, Any]] | None = None  # None: it was not made of messages
    images: list[SavedImage] = field(default_factory=list)

    @property
    def token_ids(self) -> PackedTokens:
        """Token ids, decoded from base64 at each access."""
        packed = array("i")
        packed.frombytes(base64.b64decode(self.tokens))
        return packed

    def check_scope(self, prompt: TokenizedPrompt) -> None:
        """Raise SessionError if a prompt has another adapter, or another salt."""
        adapter = "" if prompt.adapter is None else prompt.adapter.digest
        if adapter != self.adapter:
            message = f"session {shown(self.name)} was saved for model {shown(self.model)}: another adapter, or none"
            raise SessionError(message, "session_incompatible")
        if not hmac.compare_digest(_scope_digest(self.nonce, prompt), self.scope):
            message = f"session {shown(self.name)} was saved with another cache_salt, or without one"
            raise SessionError(message, "session_incompatible")

    def check_images(self, prompts: ImagePrompts | None) -> ImagePrompts | None:
        """Return what numbers images, None if the session has none. SessionError if an engine without is given some."""
        if self.images and prompts is None:
            message = f"session {shown(self.name)} has {len(self.images)} images, and this engine reads none"
            raise SessionError(message, "session_incompatible")
        return prompts if self.images else None

    def read_images(self, folder: Path) -> list[PreparedImage]:
        """Return the images of the session in a folder. SessionError if their pixels are spoilt."""
        try:
            return read_images(folder, self.images)
        except (OSError, ValueError) as error:
            message = f"the images of the saved session {shown(self.name)} cannot be read: {error}"
            raise SessionError(message, "session_unreadable", param="name") from error


def saved_session(
    name: str, model: str, prompt: TokenizedPrompt, messages: list[dict[str, Any]] | None, identity: str,
    num_blocks: int,
) -> SavedSession:  # fmt: skip
    """Return the description of a session that has just been saved."""
    nonce, tokens = secrets.token_hex(16), base64.b64encode(prompt.token_ids.tobytes()).decode()
    adapter = "" if prompt.adapter is None else prompt.adapter.digest
    return SavedSession(
        name, model, int(time.time()), len(prompt.token_ids), tokens, adapter, nonce, _scope_digest(nonce, prompt),
        identity, num_blocks, messages, saved_images(prompt.images),
    )  # fmt: skip


def _scope_digest(nonce: str, prompt: TokenizedPrompt) -> str:
    scope = Scope(prompt.cache_salt, None if prompt.adapter is None else prompt.adapter.digest)
    return hmac.digest(nonce.encode(), scope_text(scope), "sha256").hex()


def check_name(name: object) -> str:
    """Return the name of a saved session. SessionError for anything else."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.startswith("."):
        expected = "1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-', the first no '.'"
        raise SessionError(f"name must be {expected}, got {shown(name)}", "invalid_session", param="name")
    return name


def check_blocks(blocks: SessionBlocks, what: str, unusable: str) -> None:
    """Raise SessionError for blocks that were not saved, or cannot be loaded. `unusable`: the code for bad files."""
    codes = {"gone": "session_gone", "incompatible": "session_incompatible", "unusable": unusable}
    if blocks.code:
        raise SessionError(f"{what}: {blocks.message}", codes[blocks.code])


class SavedSessions:
    """The saved sessions of a directory."""

    def __init__(self, directory: Path) -> None:
        self._root = directory.expanduser() / "sessions"

    def owner_of(self, api_key: str | None) -> str:
        """Return the name of the folder of an API key's sessions; None: of clients without keys."""
        text = b"-" if api_key is None else b"+" + api_key.encode()
        return hmac.digest(self._key(), text, "sha256").hex()[:_OWNER_CHARS]

    def _key(self) -> bytes:
        """Return the random key of the directory, which is made once, whole."""
        path = private_folder(private_folder(self._root.parent) / self._root.name) / "owners.key"
        if not path.exists():
            new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            _write(new, secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):
                os.link(new, path)
            new.unlink()
        return path.read_bytes()

    def begin(self, owner: str) -> Path:
        """Return the path of a folder for a session that is about to be saved: `commit`, or `discard` it."""
        folder = private_folder(self._root / owner)
        self._delete_unfinished(folder)
        return folder / _unfinished_name()

    @staticmethod
    def commit(unfinished: Path, saved: SavedSession, pixels: Sequence[bytes] = ()) -> int:
        """Give a folder its name, in the place of the session that had it; return the bytes on the disk.

        pixels: as `distinct_pixels`, unless they are in the folder.
        """
        text = json.dumps(asdict(saved)).encode()
        if len(text) > MAX_HEADER_BYTES:
            message = f"its tokens and messages take {len(text)} bytes, and at most {MAX_HEADER_BYTES} can be saved"
            raise SessionError(message, "session_limit")
        if pixels:
            _write(private_folder(unfinished) / PIXELS, *pixels)
        _write(private_folder(unfinished) / HEADER, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        folder = unfinished.with_name(saved.name)
        replaced = unfinished.with_name(f"{unfinished.name}-old")
        with suppress(FileNotFoundError):
            folder.rename(replaced)
        unfinished.rename(folder)
        _delete(replaced)
        return _num_bytes(folder)

    @staticmethod
    def discard(unfinished: Path) -> None:
        """Delete a folder that was not committed. Nothing happens if there is none."""
        _delete(unfinished)

    def read(self, owner: str, name: str) -> tuple[SavedSession, Path]:
        """Return a saved session, and its folder. SessionError if there is none of that name, or it is spoilt."""
        folder = self._root / owner / check_name(name)
        try:
            return _read_header(folder), folder
        except FileNotFoundError:
            raise SessionError(f"there is no saved session {shown(name)}", "session_not_found", param="name") from None
        except (OSError, ValueError, TypeError, binascii.Error) as error:
            message = f"the saved session {shown(name)} cannot be read: {error}"
            raise SessionError(message, "session_unreadable", param="name") from error

    def each(self, owner: str) -> Iterator[tuple[SavedSession, int]]:
        """Yield the saved sessions of an owner that can be read, by name, and their bytes on the disk.

        Without their tokens, messages and images, which a list of many would hold at once.
        """
        for folder in self._folders(owner):
            with suppress(OSError, ValueError, TypeError, binascii.Error):
                yield replace(_read_header(folder), tokens="", messages=None, images=[]), _num_bytes(folder)

    def delete(self, owner: str, name: str) -> None:
        """Delete a saved session. SessionError if there is none of that name."""
        folder = self._root / owner / check_name(name)
        gone = folder.with_name(_unfinished_name())
        try:
            folder.rename(gone)
        except OSError:
            raise SessionError(f"there is no saved session {shown(name)}", "session_not_found", param="name") from None
        _delete(gone)

    def export(self, owner: str, name: str, output: Path) -> int:
        """Write a session into a tar file; return its bytes. SessionError as `read`, OSError if it cannot be written.
        """
        _, folder = self.read(owner, name)
        with tarfile.open(output, "w", format=tarfile.PAX_FORMAT) as archive:
            for file in SESSION_FILES:
                if (folder / file).exists() and file != "lock":
                    archive.add(folder / file, arcname=file, recursive=False)
        return output.stat().st_size

    def import_file(self, owner: str, name: str, file: Path, max_bytes: int) -> SavedSession:
        """Read a session that `export` has written, as one of an owner. SessionError if it is none, or too large.

        What is read are regular files of the names of a session alone; its description has to be whole.
        """
        check_name(name)
        unfinished = self.begin(owner)
        try:
            _extract(file, private_folder(unfinished), max_bytes)
            saved = replace(_read_header(unfinished), name=name)
            (unfinished / HEADER).unlink()
            self.commit(unfinished, saved)
        except (tarfile.TarError, OSError, ValueError, TypeError, EOFError) as error:
            self.discard(unfinished)
            if isinstance(error, SessionError):
                raise
            raise SessionError(f"{file} is not read as a session: {error}", "session_unreadable") from error
        except BaseException:
            self.discard(unfinished)
            raise
        return saved

    def use(self, owner: str | None, but_owner: str, but_name: str) -> tuple[int, int]:
        """Return how many sessions an owner (None: all) has saved, and their bytes; one of an owner is left out."""
        owners = [path.name for path in _entries(self._root) if path.is_dir()] if owner is None else [owner]
        left_out = self._root / but_owner / but_name
        folders = [folder for each in owners for folder in self._folders(each) if folder != left_out]
        return len(folders), sum(map(_num_bytes, folders))

    def _folders(self, owner: str) -> list[Path]:
        return [path for path in _entries(self._root / owner) if NAME.fullmatch(path.name) and path.name[0] != "."]

    @staticmethod
    def _delete_unfinished(folder: Path) -> None:
        """Delete what processes have left that are gone."""
        for path in _entries(folder):
            if path.name.startswith(_UNFINISHED) and not _is_alive(path.name.removeprefix(_UNFINISHED)):
                _delete(path)


def _extract(file: Path, folder: Path, max_bytes: int) -> None:
    """Copy the files of a session out of a tar file. ValueError for anything else in it, or too many bytes."""
    left = max_bytes
    with tarfile.open(file, "r:") as archive:
        for member in archive:
            if not member.isreg() or member.name not in SESSION_FILES or (folder / member.name).exists():
                raise ValueError(f"it has {shown(member.name)}, which is no file of a session")
            left -= member.size
            if left < 0:
                raise ValueError(f"it has more than {max_bytes} bytes (max_size)")
            source = archive.extractfile(member)
            assert source is not None, "a regular file"
            with os.fdopen(_create(folder / member.name), "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def _unfinished_name() -> str:
    return f"{_UNFINISHED}{os.getpid()}-{_PROCESS}-{secrets.token_hex(8)}"


def _is_alive(text: str) -> bool:
    """Return whether the process exists of which the number and the mark begin the name of an unfinished folder."""
    number, _, rest = text.partition("-")
    if number == str(os.getpid()):
        return rest.startswith(_PROCESS)
    return number.isdigit() and Path(f"/proc/{number}").exists()


def _read_header(folder: Path) -> SavedSession:
    """Read `session.json`. ValueError if it is not what was written."""
    with (folder / HEADER).open("rb") as file:
        whole = file.read(MAX_HEADER_BYTES + 66)
    digest, _, text = whole.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError(f"{HEADER} is spoilt")
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError(f"{HEADER} is no JSON object")
    images = [SavedImage(**each) for each in fields.pop("images", ())]
    saved = SavedSession(**fields, images=images)
    if len(saved.token_ids) != saved.num_tokens:
        raise ValueError(f"{HEADER} has {len(saved.token_ids)} tokens, not {saved.num_tokens}")
    if any(not 0 <= each.start < each.start + each.num_tokens <= saved.num_tokens for each in images):
        raise ValueError(f"{HEADER} has an image outside of its {saved.num_tokens} tokens")
    return saved


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; nothing if there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _num_bytes(folder: Path) -> int:
    """Return the bytes of a session's files on the disk."""
    total = 0
    for name in SESSION_FILES:
        with suppress(OSError):
            total += (folder / name).lstat().st_blocks * 512
    return total


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, *content: bytes) -> None:
    """Write a file that only its owner may read."""
    with os.fdopen(_create(path), "wb") as opened:
        opened.writelines(content)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
