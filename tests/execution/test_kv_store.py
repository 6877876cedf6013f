"""What is stored is found again to the bit or not at all: after restarts, kills, spoilt bytes, and on full disks."""

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.core.errors import ConfigError
from quire.core.kv_identity import NO_PARENT, StateParts, StoredBlock
from quire.execution import kv_store
from quire.execution.kv_store import PIECE_BYTES, CacheBlocks, KVStore, LoadedBlocks, digest
from quire.extension import _kernels
from support.fuzz_seeds import fuzz
from support.stored_blocks import (
    BLOCK_SIZE,
    IDENTITY,
    MOMENTS,
    NUM_SLOTS,
    SCOPES,
    Store,
    content,
    open_store,
    size_of,
    tokens,
    work,
)

TESTS = Path(__file__).parents[1]
OTHER = replace(IDENTITY, weights="other weights")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the path of a directory that does not exist yet."""
    return tmp_path / "some" / "kv"


@pytest.fixture
def opened(place: Path) -> Iterator[Store]:
    own = open_store(place)
    yield own
    own.store.close()


def folder_of(place: Path, number: int = 0) -> Path:
    """Return the folder of the store of `IDENTITY` with a number."""
    return place / IDENTITY.digest() / str(number)


def disk_bytes(place: Path) -> int:
    """Return the bytes that all files and directories in a place have on the disk."""
    return sum(each.lstat().st_blocks * 512 for each in (place, *place.rglob("*")))


def recovered(place: Path) -> list[int]:
    """Return the slots of the blocks that are found after a restart."""
    own = open_store(place)
    own.store.close()
    return [block.slot for block in own.store.recovered]


def test_what_is_written_can_be_read_into_other_blocks(opened: Store) -> None:
    assert opened.put(3, NO_PARENT, tokens(1))
    assert opened.put(0, 3, tokens(2))
    assert opened.put(5, NO_PARENT, tokens(1), SCOPES[1])
    assert opened.read([3, 0]) == 2
    assert opened.read([5]) == 1


def test_stored_blocks_are_there_after_a_restart_parents_first(opened: Store, place: Path) -> None:
    for slot, parent, ids in ((4, NO_PARENT, 1), (2, 4, 2), (0, 2, 3), (1, 4, 4)):
        assert opened.put(slot, parent, tokens(ids))
    opened.store.close()
    again = open_store(place)
    assert again.store.recovered == [opened.blocks[slot] for slot in (4, 2, 0, 1)]
    assert again.read([4, 2, 0]) == 3
    assert again.put(5, 0, tokens(9))
    again.store.close()
    assert recovered(place) == [4, 2, 0, 1, 5]


def test_staged_writes_end_before_the_store_is_closed(place: Path) -> None:
    own = open_store(place, bytes_per_s=1e-3)  # the second one would wait for days
    for slot in range(3):
        assert own.begin(slot, slot - 1, tokens(slot), place=slot)
    own.store.close()
    own.store.close()
    again = open_store(place)
    assert again.check() == 3
    again.store.close()


def test_emptied_slots_are_empty_after_a_restart(opened: Store, place: Path) -> None:
    for slot in range(3):
        opened.put(slot, slot - 1, tokens(slot))
    opened.store.forget([2])
    assert opened.read([0, 1, 2]) == 2
    opened.store.close()
    assert recovered(place) == [0, 1]


def test_slot_that_is_written_again_cuts_off_what_was_below_it(opened: Store, place: Path) -> None:
    for slot in range(3):
        opened.put(slot, slot - 1, tokens(slot))
    before = dict(opened.blocks)
    opened.put(0, NO_PARENT, tokens(8))
    for slot in range(3):  # 1 is below what slot 0 had
        assert opened.store.begin_read(slot, [before[slot]])
        (ended,) = opened.next()
        assert isinstance(ended, LoadedBlocks)
        assert ended.num_whole == (slot == 2)
    opened.store.close()
    assert recovered(place) == [0]


def test_block_that_is_written_over_while_it_is_read_is_a_miss(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.put(0, NO_PARENT, tokens(1))
    may_read, read_all = threading.Event(), kv_store.read_all

    def late(file: int, memory: memoryview, offset: int) -> bool:
        assert may_read.wait(60)
        return read_all(file, memory, offset)

    monkeypatch.setattr(kv_store, "read_all", late)
    assert opened.store.begin_read(7, [opened.blocks[0]])
    opened.put(0, NO_PARENT, tokens(2))
    may_read.set()
    (ended,) = opened.next()
    assert ended[:2] == (7, 0)
    opened.store.drop(7)
    assert opened.read([0]) == 1


def test_scopes_have_keys_that_belong_to_one_folder(opened: Store, place: Path, tmp_path: Path) -> None:
    texts = b"", b"a", b"b"
    opened.put(0, NO_PARENT, tokens(1), SCOPES[1])
    keys = {opened.store.scope_key(text) for text in texts}
    assert [len(key) for key in keys] == [32, 32, 32]
    opened.store.close()
    again, elsewhere = open_store(place), open_store(tmp_path / "other")
    assert {again.store.scope_key(text) for text in texts} == keys
    assert keys.isdisjoint(elsewhere.store.scope_key(text) for text in texts)
    assert all(SCOPES[1] not in each.read_bytes() for each in folder_of(place).iterdir())
    again.store.close()
    elsewhere.store.close()


def test_staging_memory_is_bounded_and_is_given_back(opened: Store) -> None:
    for slot in range(NUM_SLOTS):
        opened.put(slot, slot - 1, tokens(slot))
    path = [opened.blocks[slot] for slot in range(NUM_SLOTS)]
    assert opened.store.max_read_blocks == NUM_SLOTS
    for _ in range(3):
        assert opened.store.begin_read(1, path[:-1])
        assert not opened.store.begin_read(2, path[:2])
        assert opened.store.begin_read(2, path[:1])
        opened.store.drop(1)  # before it has been collected
        opened.store.drop(2)
        while not opened.store.begin_read(3, path):
            opened.next()
        assert opened.next() == [(3, NUM_SLOTS, NUM_SLOTS * len(content(())), pytest.approx(0, abs=60))]
        opened.store.take_into(3, [])
    num_begun = 0
    while opened.begin(num_begun % NUM_SLOTS, NO_PARENT, tokens(9, num_begun)):
        num_begun += 1  # until the memory is full: nothing is collected here
    assert num_begun == NUM_SLOTS
    while num_begun:
        num_begun -= len(opened.next())
    assert opened.put(0, NO_PARENT, tokens(5))


def test_blocks_beyond_the_cache_are_refused(opened: Store) -> None:
    opened.put(0, NO_PARENT, tokens(1))
    for place in (-1, len(opened.tensors[0])):
        with pytest.raises(AssertionError, match=f"block {place} of {len(opened.tensors[0])}"):
            opened.store.begin_write(opened.blocks[0], place)
        assert opened.store.begin_read(place, [opened.blocks[0]])
        opened.next()
        with pytest.raises(AssertionError, match=f"block {place} of"):
            opened.store.take_into(place, [place])


def test_block_of_several_pieces_is_stored(place: Path) -> None:
    arrays = [np.random.RandomState(seed).randint(0, 256, (2, PIECE_BYTES // 2 + 9), np.uint8) for seed in range(5)]
    own = KVStore.open(place, 16 << 20, CacheBlocks(arrays), BLOCK_SIZE, IDENTITY)
    block = StoredBlock(0, NO_PARENT, tokens(1), own.scope_key(b""))
    assert own.begin_write(block, 0)
    assert own.wait(60)
    own.finished()
    assert own.begin_read(0, [block])
    while not own.finished():
        assert own.wait(60)
    own.take_into(0, [1])
    for array in arrays:
        assert np.array_equal(array[0], array[1])
    own.close()


def plain_digest(octets: bytes) -> int:
    """Return what csrc/digest.cpp computes, word by word."""
    prime, mask = 0x9E3779B185EBCA87, (1 << 64) - 1

    def mixed(total: int, word: int) -> int:
        total ^= word
        return ((total << 29 | total >> 35) & mask) * prime & mask

    def of_piece(piece: bytes) -> int:
        lanes = [prime + lane for lane in range(8)]
        words = np.frombuffer(piece + bytes(-len(piece) % 64), np.uint64).reshape(-1, 8).tolist()
        rest = words.pop() if len(piece) % 64 else [0] * 8
        for row in words:
            lanes = [mixed(lane, word) for lane, word in zip(lanes, row, strict=True)]
        total = len(piece) % 64
        for lane, word in zip(lanes, rest, strict=True):
            total = mixed(total, mixed(lane, word))
        return mixed(total, total >> 32)

    pieces = [of_piece(octets[start : start + PIECE_BYTES]) for start in range(0, len(octets), PIECE_BYTES)]
    return of_piece(np.array(pieces, np.uint64).tobytes())


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 200, 4096, PIECE_BYTES, PIECE_BYTES + 72])
def test_digest_is_the_plain_one_and_of_large_blocks_that_of_pieces(num_bytes: int) -> None:
    octets = np.random.RandomState(num_bytes).randint(0, 256, num_bytes, np.uint8)
    whole, start = octets.tobytes(), _kernels.address(octets)
    assert _kernels.digest(start, num_bytes) == plain_digest(whole)
    pieces = [plain_digest(whole[first : first + PIECE_BYTES]) for first in range(0, num_bytes, PIECE_BYTES)]
    expected = pieces[0] if len(pieces) == 1 else plain_digest(np.array(pieces, np.uint64).tobytes())
    assert digest(octets) == expected


def test_files_are_the_owners_alone(opened: Store, place: Path) -> None:
    opened.put(0, NO_PARENT, tokens(1))
    found = [place, *place.rglob("*")]
    assert len(found) == 8
    for each in found:
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each
    assert json.loads((folder_of(place) / "identity.json").read_text()) == json.loads(IDENTITY.as_json())


def test_directory_that_others_may_enter_is_refused(place: Path) -> None:
    place.mkdir(parents=True, mode=0o750)
    with pytest.raises(ConfigError, match=r"kv_disk_dir: .* has mode 750, .* chmod 700"):
        open_store(place)
    place.chmod(0o700)
    open_store(place).store.close()
    folder_of(place).parent.chmod(0o701)
    with pytest.raises(ConfigError, match="has mode 701"):
        open_store(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give files away")
def test_directory_of_another_user_is_refused(place: Path) -> None:
    place.mkdir(parents=True, mode=0o700)
    os.chown(place, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345, and this process is user 0; name a directory"):
        open_store(place)


def test_links_and_files_in_place_of_directories_are_refused(place: Path, tmp_path: Path) -> None:
    place.parent.mkdir()
    (tmp_path / "real").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is not a directory"):
        open_store(place)
    assert not list((tmp_path / "real").iterdir())


@pytest.mark.parametrize("name", ["blocks", "index", "key", "lock", "identity.json"])
def test_link_in_place_of_a_file_is_not_followed(
    name: str, place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(place).store.close()
    (tmp_path / "precious").write_bytes(b"of the user")
    (folder_of(place) / name).unlink()
    (folder_of(place) / name).symlink_to(tmp_path / "precious")
    num_open = len(os.listdir("/proc/self/fd"))
    assert not open_store(place).store.is_on
    assert len(caplog.records) == 1
    assert len(os.listdir("/proc/self/fd")) <= num_open, "what others of this process close meanwhile is theirs"
    assert (tmp_path / "precious").read_bytes() == b"of the user"


def test_size_for_no_block_is_refused(place: Path) -> None:
    least = size_of(1)
    with pytest.raises(ConfigError, match=f"kv_disk_size of {least - 1} bytes holds no KV block; the least is {least}"):
        KVStore.open(place, least - 1, CacheBlocks(open_store(place).tensors), BLOCK_SIZE, IDENTITY)
    assert KVStore.open(place, least, CacheBlocks(open_store(place).tensors), BLOCK_SIZE, IDENTITY).num_slots == 1


def test_each_engine_has_a_folder(opened: Store, place: Path) -> None:
    opened.put(0, NO_PARENT, tokens(1))
    second = open_store(place)
    assert not second.store.recovered
    second.put(0, NO_PARENT, tokens(2))
    assert second.read([0]) == opened.read([0]) == 1
    assert sorted(each.name for each in folder_of(place).parent.iterdir()) == ["0", "1"]
    opened.store.close()
    third = open_store(place)  # takes the place of the first
    assert third.store.recovered == [opened.blocks[0]]
    second.store.close()
    third.store.close()


def test_engines_that_start_one_after_the_other_leave_their_folders_alone(place: Path) -> None:
    for num_stores, left in ((2, ["0", "1"]), (2, ["0", "1"]), (1, ["0"])):
        stores = [open_store(place, num_stores=num_stores) for _ in range(num_stores)]
        for own in stores:
            own.put(NUM_SLOTS - 1, NO_PARENT, tokens(1))  # allocates all slots
            own.store.close()
        first = open_store(place, num_stores=num_stores)
        assert first.check() == 1
        first.store.close()
        assert sorted(each.name for each in folder_of(place).parent.iterdir()) == left


def test_smaller_size_keeps_what_is_within(opened: Store, place: Path) -> None:
    for slot in range(NUM_SLOTS):
        opened.put(slot, slot - 1, tokens(slot))
    opened.store.close()
    small = open_store(place, num_slots=3)
    assert [block.slot for block in small.store.recovered] == [0, 1, 2]
    assert disk_bytes(place) <= size_of(3)
    assert small.check() == 3
    small.store.close()
    large = open_store(place, num_slots=50)
    assert large.check() == 3
    assert large.put(49, 2, tokens(5))
    large.store.close()


def test_blocks_are_never_found_by_another_identity(opened: Store, place: Path) -> None:
    opened.put(0, NO_PARENT, tokens(1))
    opened.store.close()
    other = open_store(place, 3 * NUM_SLOTS, identity=OTHER)
    assert not other.store.recovered
    other.store.close()
    for name in ("index", "blocks"):  # the key stays
        shutil.copy(folder_of(place) / name, place / OTHER.digest() / "0" / name)
    other = open_store(place, 3 * NUM_SLOTS, identity=OTHER)
    assert not other.store.recovered
    other.store.close()


def test_oldest_folders_that_no_store_has_open_make_room(place: Path) -> None:
    old, older, used = (replace(IDENTITY, weights=name) for name in ("old", "older", "used"))
    for age_s, identity in ((100, old), (200, older), (300, used)):
        own = open_store(place, identity=identity)
        own.put(0, NO_PARENT, tokens(1))
        if identity != used:
            own.store.close()
            os.utime(place / identity.digest() / "0" / "lock", (10_000 - age_s,) * 2)
    (place / "precious").mkdir()
    (place / "precious" / "lock").touch()
    (place / ("0" * 64)).mkdir()
    (place / ("0" * 64) / "notes").write_text("of the user")
    own = open_store(place, num_slots=2 * NUM_SLOTS)
    assert own.put(0, NO_PARENT, tokens(1))  # allocates all its slots
    assert own.put(11, 0, tokens(2))
    own.store.close()
    names = {each.name for each in place.iterdir()}
    assert names == {each.digest() for each in (IDENTITY, used)} | {"precious", "0" * 64}
    assert (place / ("0" * 64) / "notes").exists()


def test_folders_beyond_a_smaller_size_are_deleted_at_once(place: Path) -> None:
    for identity in (OTHER, IDENTITY):
        own = open_store(place, 4 * NUM_SLOTS if identity == OTHER else NUM_SLOTS, identity)
        if identity == OTHER:
            own.put(0, NO_PARENT, tokens(1))
        own.store.close()
    assert [each.name for each in place.iterdir()] == [IDENTITY.digest()]


def test_younger_folders_stay_while_they_fit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "EXTENT_BYTES", 4 * 4096)
    old, older = (replace(IDENTITY, weights=name) for name in ("old", "older"))
    for age_s, identity in ((100, old), (200, older)):
        own = open_store(place, num_slots=30, identity=identity)
        own.put(0, NO_PARENT, tokens(1))
        own.store.close()
        os.utime(place / identity.digest() / "0" / "lock", (10_000 - age_s,) * 2)
    own = open_store(place, num_slots=30)
    kept = []
    for slot in range(30):
        own.put(slot, slot - 1, tokens(slot))
        assert disk_bytes(place) <= size_of(30)
        kept.append({each.name for each in place.iterdir()} - {IDENTITY.digest()})
    own.store.close()
    assert kept[0] == {old.digest(), older.digest()}
    assert {old.digest()} in kept
    assert kept[-1] == set()


def test_parts_of_a_state_are_its_bytes_over_all_layers() -> None:
    generator = np.random.RandomState(1)
    tensors = [generator.randint(0, 256, (5, 40), np.uint8), generator.randint(0, 256, (5, 24), np.uint8)]
    states = [generator.randint(0, 256, (3, width), np.uint8) for width in (70, 130)]
    cache, before = CacheBlocks(tensors, states), [each.copy() for each in states]
    assert cache.parts == StateParts(5, 4)
    rows = np.full((4, 64), 0xFF, np.uint8)
    for number, row in zip(cache.parts.numbers(1), rows, strict=True):
        cache.copy_out(number, row)
    assert rows.tobytes() == before[0][1].tobytes() + before[1][1].tobytes() + bytes(56)
    for number, row in zip(cache.parts.numbers(2), rows, strict=True):
        cache.copy_in(row, number)
    for state, old in zip(states, before, strict=True):
        assert np.array_equal(state, old[[0, 1, 1]])
    assert len({cache.parts.tokens(8)[start : start + 32] for start in range(0, 128, 32)}) == 4
    cache.copy_out(4, rows[0])
    assert rows[0].tobytes() == tensors[0][4].tobytes() + tensors[1][4].tobytes()


def test_descriptors_memory_and_disk_are_flat_over_ten_times_the_slots(place: Path) -> None:
    def usage() -> tuple[int, int, int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return len(os.listdir("/proc/self/fd")), threading.active_count(), disk_bytes(place), resident

    arrays = [np.random.RandomState(seed).randint(0, 256, (2, 32 << 10), np.uint8) for seed in range(4)]
    own = KVStore.open(place, 8 << 20, CacheBlocks(arrays), BLOCK_SIZE, IDENTITY)
    scope, samples = own.scope_key(b""), list[tuple[int, int, int, int]]()
    for round_number in range(10):
        blocks = [StoredBlock(slot, slot - 1, tokens(slot, round_number), scope) for slot in range(own.num_slots)]
        num_written = 0
        for block in blocks:
            while not own.begin_write(block, 0):
                num_written += len(own.finished())
        while num_written < len(blocks):
            assert own.wait(60)
            num_written += len(own.finished())
        assert own.begin_read(round_number, blocks)
        ended = []
        while not ended:
            assert own.wait(60)
            ended = own.finished()
        assert ended[-1].num_whole == own.num_slots
        own.take_into(round_number, [1] * own.num_slots)
        samples.append(usage())
    own.close()
    first, last = samples[1], samples[-1]
    assert last[0] <= first[0], "what others of this process close meanwhile is theirs"
    assert last[1] <= first[1]
    assert max(sample[2] for sample in samples) <= 8 << 20
    assert last[2] == first[2]
    assert last[3] - first[3] < 4 << 20


class Fatal:
    """A process that makes processes which are killed while they work on a store."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.stored_blocks"], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(TESTS), "OPENBLAS_NUM_THREADS": "1"}, text=True,
        )  # fmt: skip

    def work(self, place: Path, number: int, moment: str) -> tuple[int, str]:
        """Return the exit status, and the name of the call at which the process was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(place), number, moment]) + "\n")
        self._process.stdin.flush()
        status, name = json.loads(self._process.stdout.readline())
        return status, name

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def fatal() -> Iterator[Fatal]:
    made = Fatal()
    yield made
    made.close()


def expected_content(place: Path) -> int:
    """Open a store, check all that it finds, use it, and return how many blocks it found."""
    own = open_store(place)
    assert own.store.is_on
    num_whole = own.check()
    free = next(slot for slot in range(NUM_SLOTS) if slot not in own.blocks or not _has_child(own, slot))
    assert own.put(free, NO_PARENT, tokens(77))
    assert own.read([free], job=99) == 1
    own.store.close()
    assert disk_bytes(place) <= size_of(NUM_SLOTS)
    return num_whole


def _has_child(own: Store, slot: int) -> bool:
    return any(block.parent == slot for block in own.blocks.values())


def test_process_that_is_killed_at_any_call_leaves_whole_blocks_or_none(fatal: Fatal, tmp_path: Path) -> None:
    calls, found = dict[str, int](), list[int]()
    for moment in MOMENTS:
        number, status = 0, -9
        while status == -9:
            number += 1
            place = tmp_path / f"{moment}-{number}"
            old = open_store(place, identity=OTHER)  # makes room in the first process
            old.put(0, NO_PARENT, tokens(1))
            old.store.close()
            status, name = fatal.work(place, number, moment)
            assert status in (-9, 0), f"call {number}, {moment}: {name}"
            calls[name] = calls.get(name, 0) + 1
            try:
                found.append(expected_content(place))
            except BaseException as fault:
                fault.add_note(f"killed at call {number} ({name}), {moment}")
                raise
            shutil.rmtree(place)
    assert {"open", "pwrite", "posix_fallocate", "utime", "unlink", "close"} <= set(calls)
    assert calls["pwrite"] > 80
    assert set(found) >= set(range(6))


FULL = """
import sys
from pathlib import Path
from quire.execution import kv_store
from support.stored_blocks import NO_PARENT, open_store, tokens
kv_store.EXTENT_BYTES = 8 * 4096
own = open_store(Path(sys.argv[1]), num_slots=1000)
num_slots, num_whole = own.store.num_slots, 0
while own.store.is_on and own.put(num_whole, num_whole - 1, tokens(num_whole)):
    num_whole += 1
assert not own.store.is_on
assert not own.begin(num_whole, num_whole - 1, tokens(1))
if num_whole:
    own.store.forget([num_whole - 1])
    assert own.read(range(10)) == 10
own.store.close()
print(num_slots, num_whole)
"""


def ended_script(place: Path, *before: str, within: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `FULL` behind commands of the shell."""
    (place.parent / "full.py").write_text(FULL)
    line = " && ".join((*before, f"exec {sys.executable} {place.parent}/full.py {place}"))
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [*within, "/bin/sh", "-c", line]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_file_that_may_not_grow_turns_the_store_off_with_one_line(tmp_path: Path) -> None:
    ended = ended_script(tmp_path / "kv", "ulimit -f 512")  # 256 KiB: the index fits
    assert ended.stdout == "1000 64\n", ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "is off, no more blocks are written: [Errno 27] File too large" in ended.stderr


OWN_MOUNTS = "unshare", "-m"
MAY_MOUNT = shutil.which("unshare") and not subprocess.run(
    [*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
).returncode


@pytest.mark.skipif(not MAY_MOUNT, reason="needs the right to mount")
@pytest.mark.parametrize(("size", "mode", "line"), [
    ("80k", "rw", "is off: [Errno 28] No space left on device"),  # no room for the index
    ("400k", "rw", "is off, no more blocks are written: [Errno 28] No space left on device"),
    ("9m", "ro", "is off: [Errno 30] Read-only file system"),
])  # fmt: skip
def test_full_and_read_only_disks_turn_the_store_off_with_one_line(
    size: str, mode: str, line: str, tmp_path: Path
) -> None:
    place = tmp_path / "mounted"
    place.mkdir()
    mounts = f"mount -t tmpfs -o size={size},mode=700 none {place}", f"mount -o remount,{mode} {place}"
    ended = ended_script(place, *mounts, within=OWN_MOUNTS)
    num_slots, num_whole = map(int, ended.stdout.split())
    assert (num_slots, num_whole > 20) == ((1000, True) if size == "400k" else (0, False))
    assert len(ended.stderr.splitlines()) == 1
    assert line in ended.stderr


def spoil(place: Path, rng: random.Random) -> str:
    """Change one thing or more in the files of a store; return what was done."""
    done = list[str]()
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(["blocks", "blocks", "index", "index", "index", "key", "identity.json", "lock"])
        file = folder_of(place) / name
        if file.is_symlink() or not file.is_file():
            continue
        whole = bytearray(file.read_bytes())
        change = rng.choice(["byte", "byte", "bytes", "swap", "copy", "zeros", "cut", "more", "delete", "place"])
        unit = {"index": 152, "blocks": 4096}.get(name, 8)
        if change in ("swap", "copy") and len(whole) >= 2 * unit:
            first, second = (rng.randrange(len(whole) // unit) * unit for _ in range(2))
            one, other = whole[first : first + unit], whole[second : second + unit]
            whole[second : second + unit] = one
            if change == "swap":
                whole[first : first + unit] = other
        elif change in ("bytes", "zeros") and whole:
            start = rng.randrange(len(whole))
            stop = min(start + rng.randint(1, 300), len(whole))
            whole[start:stop] = rng.randbytes(stop - start) if change == "bytes" else bytes(stop - start)
        elif change == "cut":
            del whole[rng.randint(0, len(whole)) :]
        elif change == "more":
            whole += rng.randbytes(rng.randint(1, 5000))
        elif change == "delete":
            file.unlink()
        elif change == "place" and rng.random() < 0.3:
            file.unlink()
            rng.choice([Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])(file)
        elif whole:
            whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        if change not in ("delete", "place") or file.is_file():
            file.write_bytes(whole)
        done.append(f"{change} of {name}")
    return ", ".join(done)


@pytest.fixture(scope="module")
def whole_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a store of two paths that branch, with slots written twice and emptied."""
    place = tmp_path_factory.mktemp("whole") / "kv"
    work(place)
    return place


def run_spoilt(whole_store: Path, tmp_path: Path, seed: int) -> int:
    """Open a spoilt store; return how many blocks were lost. Those that are found are what was written."""
    place = Path(shutil.copytree(whole_store, tmp_path / f"spoilt-{seed}"))
    done = spoil(place, random.Random(seed))
    try:
        own = open_store(place)
        num_whole = own.check()
        if own.store.is_on:
            assert own.put(5, NO_PARENT, tokens(77))
            assert own.read([5], job=99) == 1
        own.store.close()
        again = open_store(place)
        assert again.check() >= own.store.is_on
        again.store.close()
    except BaseException as fault:
        fault.add_note(f"seed {seed}: {done}")
        raise
    shutil.rmtree(place)
    return NUM_SLOTS - num_whole


def test_spoilt_store_is_a_miss_or_what_was_written(whole_store: Path, tmp_path: Path) -> None:
    lost = [run_spoilt(whole_store, tmp_path, seed) for seed in range(50)]
    assert sum(map(bool, lost)) > 15
    assert 0 in lost


@pytest.mark.fuzz
def test_many_spoilt_stores(whole_store: Path, tmp_path: Path) -> None:
    def run(seed: int) -> None:
        for number in range(500):
            with suppress(FileNotFoundError):
                shutil.rmtree(tmp_path / f"spoilt-{500 * seed + number}")
            run_spoilt(whole_store, tmp_path, 500 * seed + number)

    fuzz(run, 1000)
