"""Names of blocks outside of a cache: on a disk, in a saved session, and on the way to another engine.

There a block is named by its tokens. In the cache an image's tokens have a number that the server has given the image
(`core.images.cache_keys`), which means another image after a restart. So outside a block with such tokens is named by
a digest of as many bytes: of its tokens of text, and of the SHA-256 of each of its images, over pixels, grid and all
that makes rows of hidden states of these. A salt is not in it: scopes are kept apart by their roots.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256, shake_256

import numpy as np

from quire.core.images import PromptImage
from quire.core.token_ids import TOKEN_BYTES

MAX_KNOWN_IMAGES = 1 << 16      # 12 MB
_MARK = b"\xff\xff\xff\xff"     # the first token of a digest is -1, which is no text's


class StoredKeys:
    """Names of the blocks of an engine's requests, and the digests of their images, the latest MAX_KNOWN_IMAGES.

    `kind`: digest of what the rows of an image depend on beside its pixels and the weights, set once before the first.
    A name has `block_size` times 4 bytes, of which the first 4 are the mark.
    """

    def __init__(self, block_size: int) -> None:
        self._num_bytes, self.kind = TOKEN_BYTES * block_size, b""
        self._digests = OrderedDict[int, bytes]()   # serial -> SHA-256, the least recently used first

    def know(self, images: Iterable[PromptImage]) -> None:
        """Compute the digests of the images of a request, once for each; a megabyte of pixels takes 0.5 to 2.5 ms."""
        for image in images:
            if image.serial not in self._digests:
                found, own = sha256(self.kind), image.prepared
                found.update(b"%d %d %d %d " % (own.height, own.width, *own.grid))
                found.update(own.pixels)
                self._digests[image.serial] = found.digest()
            self._digests.move_to_end(image.serial)
        while len(self._digests) > MAX_KNOWN_IMAGES:
            self._digests.popitem(last=False)

    def names(self, packed: bytes) -> bytes:
        """Return the names of full blocks, given by the keys of their tokens, up to the first with an unknown image."""
        if not self._digests or not packed or (keys := np.frombuffer(packed, np.int32)).min() >= 0:
            return packed
        with_images = np.flatnonzero(keys.reshape(-1, self._num_bytes // TOKEN_BYTES).min(axis=1) < 0)
        names, named = bytearray(packed), dict[bytes, bytes | None]()   # most blocks inside of an image are equal
        for start in (with_images * self._num_bytes).tolist():
            own = packed[start : start + self._num_bytes]
            if own not in named:
                named[own] = self._name(array("i", own))
            if (name := named[own]) is None:
                return bytes(names[:start])
            names[start : start + self._num_bytes] = name
        return bytes(names)

    def _name(self, keys: "array[int]") -> bytes | None:
        """Return the name of a block with images; None if one is not known."""
        images = list(dict.fromkeys(key for key in keys if key < 0))
        digests = [self._digests.get(-1 - key, b"") for key in images]
        if not all(digests):
            return None
        tokens = array("i", [key if key >= 0 else -1 - images.index(key) for key in keys])
        return _MARK + shake_256(tokens.tobytes() + b"".join(digests)).digest(self._num_bytes - len(_MARK))
