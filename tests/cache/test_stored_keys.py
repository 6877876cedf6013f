"""Names of blocks outside of a cache: equal where text and images are equal, whatever numbers the images have."""

from array import array
from dataclasses import dataclass
from random import Random

import pytest

from quire.cache import stored_keys
from quire.cache.prefix_tree import as_bytes
from quire.cache.stored_keys import StoredKeys
from quire.core.image_processing import PreparedImage
from quire.core.images import PromptImage
from quire.core.kv_identity import StateParts

SIZE = 8
PICTURES = [PreparedImage(2, 2, (1, 1), bytes([number] * 12)) for number in range(3)]


@dataclass
class Server:
    """An engine with numbers of its own for pictures: those of `order`."""

    order: tuple[int, ...]
    kind: bytes = b""

    def __post_init__(self) -> None:
        self.keys = StoredKeys(SIZE)
        self.keys.kind = self.kind
        self.keys.know(PromptImage(0, 1, serial, PICTURES[number]) for serial, number in enumerate(self.order))

    def name(self, block: list[int | str]) -> bytes:
        """Return the name of a block of ids, and of tokens of pictures: their numbers as texts."""
        keys = [each if isinstance(each, int) else -1 - self.order.index(int(each)) for each in block]
        return self.keys.names(as_bytes(keys))


def test_names_are_those_of_the_pixels_and_the_text() -> None:
    """Random blocks, in pairs that differ in one token, by engines with other numbers."""
    random, one, two = Random(0), Server((0, 1, 2)), Server((2, 0, 1))
    other_kind, names = Server((0, 1, 2), b"other"), dict[tuple[int | str, ...], bytes]()
    tokens: list[int | str] = [0, 1, 7, "0", "1", "2"]
    for _ in range(300):
        block = random.choices(tokens, k=SIZE)
        changed = list(block)
        changed[random.randrange(SIZE)] = random.choice(tokens)
        for each in (block, changed):
            name = one.name(each)
            assert (len(name), name) == (4 * SIZE, two.name(each))
            has_images = any(isinstance(token, str) for token in each)
            assert has_images == (other_kind.name(each) != name)
            assert has_images or name == as_bytes(each)   # type: ignore[arg-type]
            assert names.setdefault(tuple(each), name) == name
    assert len(set(names.values())) == len(names) > 400
    parts = StateParts(1, 3).tokens(SIZE)
    assert not set(names.values()) & {parts[start : start + 4 * SIZE] for start in range(0, len(parts), 4 * SIZE)}


def test_a_run_ends_before_an_image_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server((0, 1))
    text, known, unknown = [5] * SIZE, [-1] * SIZE, [4] * (SIZE - 1) + [-9]
    run = server.keys.names(as_bytes(text + known + text + unknown + text))
    assert run == b"".join(map(server.keys.names, map(as_bytes, (text, known, text))))
    monkeypatch.setattr(stored_keys, "MAX_KNOWN_IMAGES", 2)
    server.keys.know([PromptImage(0, 1, 0, PICTURES[0]), PromptImage(0, 1, 7, PICTURES[2])])
    found = [len(server.keys.names(array("i", [-1 - serial] * SIZE).tobytes())) for serial in (0, 1, 7)]
    assert found == [4 * SIZE, 0, 4 * SIZE]
