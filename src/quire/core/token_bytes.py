"""Bytes of the tokens of a vocabulary, in a form that is compact and quick to send to another process.

Grammars decide by bytes which tokens may follow, so the process that samples needs them, and it has no tokenizer.
"""

from array import array
from collections.abc import Iterable
from typing import Self

import msgspec


class TokenBytes(msgspec.Struct, array_like=True, frozen=True):
    """The bytes of each token id. 151,643 tokens of 6 bytes take 1.5 MB.

    `joined` holds the bytes of all tokens in order of their ids, `offsets` the uint32 bounds of each in it: one more
    than there are tokens, in the machine's byte order. A special token has the bytes of its name.
    """

    joined: bytes
    offsets: bytes
    special_token_ids: frozenset[int]

    @classmethod
    def pack(cls, tokens: Iterable[bytes], special_token_ids: frozenset[int]) -> Self:
        """Return the table of tokens, given in order of their ids."""
        joined, offsets = bytearray(), array("I", [0])
        for token in tokens:
            joined += token
            offsets.append(len(joined))
        return cls(bytes(joined), offsets.tobytes(), special_token_ids)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.offsets) // array("I").itemsize - 1

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer skips. IndexError past the last."""
        if not 0 <= token_id < len(self):
            raise IndexError(f"token id {token_id} is out of a vocabulary of {len(self)}")
        start, stop = memoryview(self.offsets).cast("I")[token_id : token_id + 2]
        return self.joined[start:stop]
