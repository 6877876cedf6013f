"""Known tokens of a sequence: the prompt, shared by all branches of a request, then the branch's output.

A prompt of 128,000 tokens with n = 64 is held once, and a fork costs as much as its output is long. The prompt is
packed into 4 bytes a token, as in rows of the worker and in keys of the prefix tree: slices of it are copied as memory.
"""

from array import array
from collections.abc import Iterator, Sequence
from operator import eq
from struct import pack
from typing import TYPE_CHECKING, Self, TypeAlias, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    PackedTokens: TypeAlias = array[int]
else:
    PackedTokens = array  # cannot be subscripted in Python 3.11

TOKEN_BYTES = 4     # of a packed token


def pack_tokens(token_ids: Sequence[int]) -> PackedTokens:
    """Return token ids as 32-bit integers; those that are packed, as they are. struct.error if one does not fit."""
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    packed = array("i")
    packed.frombytes(pack(f"{len(token_ids)}i", *token_ids))  # 2.5 times as fast as array("i", token_ids)
    return packed


def num_equal_tokens(left: Sequence[int], right: Sequence[int], stop: int) -> int:
    """Return how many of the first `stop` tokens two sequences have in common at their beginnings: both have as many.

    Prompts are compared where they are: a copy of 400 KB costs ten times as much as the comparison.
    """
    differing = np.flatnonzero(_first_tokens(left, stop) != _first_tokens(right, stop))
    return int(differing[0]) if len(differing) else stop


def _first_tokens(token_ids: Sequence[int], stop: int) -> NDArray[np.int32]:
    if isinstance(token_ids, TokenIds) and stop <= len(token_ids.prompt):
        return np.frombuffer(token_ids.prompt, dtype=np.int32)[:stop]
    return np.array(token_ids[:stop], dtype=np.int32)


class TokenIds(Sequence[int]):
    """A list of token ids that grows at its end. `prompt` is shared and never changed; `output` is the sequence's own.

    Hot paths use `output` itself: its `append` and `len` cost less than methods of this class.
    """

    __slots__ = ("output", "prompt")

    def __init__(self, prompt: PackedTokens, output: Sequence[int] = ()) -> None:
        self.prompt = prompt
        self.output = list(output)

    def fork(self) -> Self:
        """Return a list of the same tokens that grows by itself."""
        return type(self)(self.prompt, self.output)

    def append(self, token_id: int) -> None:
        """Add a token at the end."""
        self.output.append(token_id)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> PackedTokens: ...

    def __getitem__(self, index: int | slice) -> int | PackedTokens:
        num_prompt = len(self.prompt)
        if isinstance(index, slice):
            if index.stop is not None and 0 <= index.stop <= num_prompt and (index.start or 0) >= 0:
                return self.prompt[index]
            start, stop, step = index.indices(len(self))
            assert step == 1, f"a slice with step {step}"
            if stop <= num_prompt:
                return self.prompt[start:stop]
            tail = array("i", self.output[max(0, start - num_prompt) : stop - num_prompt])
            return self.prompt[start:] + tail if start < num_prompt else tail
        position = index + len(self) if index < 0 else index
        if position < 0:
            raise IndexError(f"index {index} in {len(self)} tokens")
        return self.prompt[position] if position < num_prompt else self.output[position - num_prompt]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[np.int32]:
        """Return the tokens as NumPy asks for them: at the cost of copying memory, not of a loop over tokens."""
        prompt = np.frombuffer(self.prompt, dtype=np.int32)
        if not self.output and not copy:
            return prompt
        return np.concatenate([prompt, np.array(self.output, dtype=np.int32)])

    def __iter__(self) -> Iterator[int]:
        yield from self.prompt
        yield from self.output

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of token ids."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenIds({self.prompt.tolist()}, {self.output})"
