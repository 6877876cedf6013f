"""Scratch blocks of a draft model: blocks outside the pool for the keys and values of draft tokens."""

from dataclasses import dataclass

MAX_DRAFTED_ROWS = 64  # at once: with 4 drafts and blocks of 16 their scratch blocks hold 3,072 tokens
MAX_PENDING = 16       # known tokens without keys and values before the drafts: 1, or those that a grammar has forced


@dataclass(frozen=True, slots=True)
class ScratchBlocks:
    """Count of scratch blocks: for `num_rows` rows at once, `per_row` for each."""

    num_rows: int
    num_drafts: int    # the most of a row
    per_row: int

    @classmethod
    def of(cls, num_drafts: int, max_num_seqs: int, block_size: int) -> "ScratchBlocks":
        """Return the count for drafts of up to `num_drafts` tokens. The last draft token is not computed."""
        num_tokens = block_size - 1 + MAX_PENDING + num_drafts - 1  # behind the last whole block
        return cls(min(max_num_seqs, MAX_DRAFTED_ROWS), num_drafts, -(-num_tokens // block_size))

    @property
    def num_blocks(self) -> int:
        """Blocks for all rows."""
        return self.num_rows * self.per_row
