"""Verification of draft tokens: the tokens that single steps would have sampled.

A draw is a function of a position's logits, the row's parameters and seed, and the output index alone. So draws at
several positions of a row equal those of single steps as long as the tokens before them are the same: drafts are kept
while they equal the draw, and the first draw that differs replaces its draft. Tokens, logprobs and their distribution
are those of decoding without drafts at every temperature (compare Leviathan et al. 2023: exact for point-mass drafts).
"""

from collections.abc import Sequence


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of the drafts equal the sampled tokens, before the first that differs.

    `sampled` has one token more: sample i stands at the position of draft i, the last one behind all drafts.
    """
    assert len(sampled) == len(drafts) + 1, f"{len(sampled)} samples for {len(drafts)} drafts"
    differing = (index for index, draft in enumerate(drafts) if draft != sampled[index])
    return next(differing, len(drafts))
