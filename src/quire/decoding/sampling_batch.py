"""SamplingBatch: the samples of a step without their logits, one record instead of five arguments."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.decoding.row_grammars import TokenMasks
from quire.decoding.sampling_state import MIN_TOKENS, SamplingState


class SamplingBatch(NamedTuple):
    """The samples of a step, one for each row of its logits.

    features uint32 [num_samples], the flags of `SamplingState` that each uses in this step; rows int64 [num_samples],
    the row of `state` and `token_ids` that each is for; token_ids [max_rows, max_len], the known tokens of every row;
    num_tokens int64 [num_samples], how many of them each sample has, prompt and output; masks of the samples whose rows
    have grammars.
    """

    state: SamplingState
    features: NDArray[np.uint32]
    rows: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    masks: TokenMasks | None = None

    @classmethod
    def of(
        cls,
        state: SamplingState,
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        masks: TokenMasks | None = None,
    ) -> "SamplingBatch":
        """Collect the features of each sample in this step: min_tokens only below that number of tokens."""
        features = state.features[rows]
        early = np.flatnonzero(features & MIN_TOKENS)
        if early.size:
            settings = state.settings[rows[early]]
            has_enough = num_tokens[early] - settings["num_prompt_tokens"] >= settings["min_tokens"]
            features[early[has_enough]] &= ~np.uint32(MIN_TOKENS)
        return cls(state, features, rows, token_ids, num_tokens, masks)

    @property
    def wanted(self) -> int:
        """The flags that any sample uses."""
        return int(np.bitwise_or.reduce(self.features))

    def using(self, features: int) -> NDArray[np.int64]:
        """Return the samples that use any of `features`, ascending."""
        return np.flatnonzero(self.features & features)

    def take(self, which: NDArray[np.int64]) -> "SamplingBatch":
        """Return some of the samples, in the order given, without masks."""
        return SamplingBatch(
            self.state, self.features[which], self.rows[which], self.token_ids, self.num_tokens[which]
        )

    def settings(self) -> NDArray[np.void]:
        """Return each sample's settings, ROW_DTYPE [num_samples]."""
        return self.state.settings[self.rows]

    def output(self, index: int) -> NDArray[np.int32]:
        """Return the tokens [num_output] that sample `index` has generated so far."""
        row = self.rows[index]
        return self.token_ids[row, self.state.settings["num_prompt_tokens"][row] : self.num_tokens[index]]
