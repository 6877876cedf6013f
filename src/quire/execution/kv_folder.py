"""Folder of a KV store: its files, the lock of its one writer, and the folders of other identities beside it.

    DIR/<digest of the identity>/<number>/  lock, identity.json, key, index, blocks

Engines of one identity have a folder each, the first number that is free. Folders are 0700 and files 0600: keys and
values are the users' text in another form. Nothing is followed or deleted that has another owner or another name.
"""

import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.core.kv_identity import KVIdentity

MAX_FOLDERS = 64  # engines of one identity in a directory
KEY_BYTES = 32
FILES = ("blocks", "index", "key", "identity.json", "lock")  # deleted in this order
_DIGEST = re.compile("[0-9a-f]{64}")


class KVFolder(NamedTuple):
    """A locked folder, and its open files. The lock is held until it is closed, however the process ends.

    `lock` is None for a folder that is only read, such as that of another engine.
    """

    path: Path
    lock: int | None
    index_file: int
    blocks_file: int
    key: bytes     # random, of this folder

    @property
    def directory(self) -> Path:
        """The directory of all identities."""
        return self.path.parent.parent

    def close(self) -> None:
        """Close the files, and unlock the folder."""
        if self.lock is not None:
            os.utime(self.lock)
        for file in (self.index_file, self.blocks_file, self.lock):
            if file is not None:
                os.close(file)


def open_folder(directory: Path, identity: KVIdentity, index_bytes: int, blocks_bytes: int) -> KVFolder:
    """Lock the first free folder of an identity, which is made if there is none.

    index_bytes, blocks_bytes: most bytes of these files, which are cut if they have more. Raises ConfigError for a
    directory that is not the process's own or that others may enter, OSError if it cannot be written.
    """
    own = private_folder(private_folder(directory) / identity.digest())
    for number in range(MAX_FOLDERS):
        found = _open_unlocked(own / str(number), identity, index_bytes, blocks_bytes)
        if found is not None:
            return found
    raise OSError(f"{own}: {MAX_FOLDERS} engines use it already")


def open_others(own: KVFolder) -> list[KVFolder]:
    """Open the other folders of an identity for reading, in use or not; those that cannot be read are left out."""
    paths = sorted(_folders_named(own.path.parent, re.compile("[0-9]{1,2}")))
    found = list[KVFolder]()
    for path in paths:
        with suppress(OSError):
            if path != own.path:
                found.append(open_read(path))
    return found


def open_read(path: Path) -> KVFolder:
    """Open a folder for reading, in use or not. OSError if it cannot be read."""
    opened = list[int]()
    try:
        opened += (_open(path / name, os.O_RDONLY) for name in ("index", "blocks"))
        index, blocks = opened
        return KVFolder(path, None, index, blocks, (path / "key").read_bytes())
    except BaseException:
        for file in opened:
            os.close(file)
        raise


def open_alone(folder: Path, identity: KVIdentity, index_bytes: int, blocks_bytes: int) -> KVFolder:
    """Lock a folder that is no part of a directory of engines, as `open_folder`. OSError while another process has it.
    """
    found = _open_unlocked(folder, identity, index_bytes, blocks_bytes)
    if found is None:
        raise OSError(f"{folder} is in use")
    return found


def _open_unlocked(folder: Path, identity: KVIdentity, index_bytes: int, blocks_bytes: int) -> KVFolder | None:
    """Lock a folder and open its files; None while another store has it."""
    lock = _locked(private_folder(folder))
    if lock is None:
        return None
    try:
        os.utime(lock)
        return _opened(folder, lock, identity, index_bytes, blocks_bytes)
    except BaseException:
        os.close(lock)
        raise


def private_folder(folder: Path) -> Path:
    """Make a folder that none but its owner may enter, or check that it is one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"kv_disk_dir: {str(folder)!r} is not a directory")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"kv_disk_dir: {str(folder)!r} belongs to user {found.st_uid}, and this process is user {os.geteuid()}; "
            "name a directory that does not exist yet"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"kv_disk_dir: {str(folder)!r} has mode {found.st_mode & 0o777:o}, and must be closed to other users: "
            f"chmod 700 {str(folder)!r}"
        )
    return folder


def _open(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a regular file of the process's own. OSError for a link and anything else."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return file
    os.close(file)
    raise OSError(f"{path} is not a file of user {os.geteuid()}")


def _locked(folder: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """Return the locked file of a folder; None while another process, or another store of this one, holds it."""
    lock = _open(folder / "lock", flags)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_same = (folder / "lock").stat().st_ino == os.fstat(lock).st_ino  # else it was deleted before it was locked
    except (BlockingIOError, FileNotFoundError):
        is_same = False
    except BaseException:
        os.close(lock)
        raise
    if is_same:
        return lock
    os.close(lock)
    return None


def _opened(folder: Path, lock: int, identity: KVIdentity, index_bytes: int, blocks_bytes: int) -> KVFolder:
    opened = list[int]()
    try:
        for name in ("key", "index", "blocks"):
            opened.append(_open(folder / name))
        key_file, index, blocks = opened
        key = os.pread(key_file, KEY_BYTES + 1, 0)
        if len(key) != KEY_BYTES:
            key = secrets.token_bytes(KEY_BYTES)
            os.ftruncate(index, 0)  # all of it was made under another key
            os.ftruncate(key_file, 0)
            os.pwrite(key_file, key, 0)
        _write_identity(folder, identity)
        os.posix_fallocate(index, 0, index_bytes)
        for file, most in ((index, index_bytes), (blocks, blocks_bytes)):
            if os.fstat(file).st_size > most:
                os.ftruncate(file, most)
    except BaseException:
        for file in opened:
            os.close(file)
        raise
    os.close(key_file)
    return KVFolder(folder, lock, index, blocks, key)


def _write_identity(folder: Path, identity: KVIdentity) -> None:
    """Write what the folder's name stands for, for people to read."""
    text, path = identity.as_json().encode(), folder / "identity.json"
    file = _open(path)
    try:
        if os.pread(file, len(text) + 1, 0) == text:
            return
        os.ftruncate(file, 0)
        os.pwrite(file, text, 0)
    finally:
        os.close(file)


def delete_older(own: KVFolder, limit: int, num_stores: int) -> None:
    """Delete folders in the directory that no store has open, the oldest first, until the others have `limit` bytes.

    A folder is as old as its last opening or closing. The first `num_stores` folders of the own identity do not count.
    """
    found = sorted(_folders(own, num_stores))
    total = sum(num_bytes for _, _, num_bytes in found)
    for _, folder, num_bytes in found:
        if total <= limit:
            break
        if _delete(folder):
            total -= num_bytes


def _folders(own: KVFolder, num_stores: int) -> list[tuple[int, Path, int]]:
    """Return when each other folder was last opened, its path and the bytes of its files; not those in use."""
    found = list[tuple[int, Path, int]]()
    for identity in _folders_named(own.directory, _DIGEST):
        for folder in _folders_named(identity, re.compile("[0-9]{1,2}")):
            if folder == own.path or (identity == own.path.parent and int(folder.name) < num_stores):
                continue
            with suppress(OSError):
                lock = _locked(folder, os.O_RDWR)
                if lock is None:
                    continue
                opened_ns = os.fstat(lock).st_mtime_ns
                os.close(lock)
                sizes = (_allocated_bytes(folder / name) for name in FILES)
                found.append((opened_ns, folder, sum(sizes)))
    return found


def _folders_named(directory: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the process's own folders in a directory that have such a name."""
    found = list[Path]()
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            is_own = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            if is_own and name.fullmatch(entry.name):
                found.append(Path(entry.path))
    return found


def _allocated_bytes(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except OSError:
        return 0


def _delete(folder: Path) -> bool:
    """Delete a folder that no process uses, and its parent if that is empty; return whether it is gone."""
    with suppress(OSError):
        lock = _locked(folder, os.O_RDWR)
        if lock is None:
            return False
        try:
            for name in FILES:
                with suppress(FileNotFoundError):
                    os.unlink(folder / name)
        finally:
            os.close(lock)
        os.rmdir(folder)
        with suppress(OSError):
            os.rmdir(folder.parent)
        return True
    return False
