"""Preemption by swap or recompute: the choice, and the cost of both.

`auto` takes for each victim the cheaper kind at the rates that the worker has measured: moving its blocks out and back,
or a prefill of its computed tokens (Kwon et al. 2023, section 4.5, leaves the choice to the operator). A block that
other requests hold as well is likely to be found in the cache on return: it is swapped out, but neither swapped in nor
recomputed. While a rate is not known, the victim is swapped: that measures the rate of swapping, and the rate of
prefills is known from the first prompt of more than one token on. See docs/decisions/0008.
"""

from dataclasses import dataclass, field

from quire.cache.swap_space import Footprint
from quire.core.config import PreemptionKind, PreemptionMode
from quire.core.plan import UNMEASURED
from quire.core.sequence import Request, Sequence


@dataclass(slots=True)
class PreemptionStats:
    """Preemptions since start, by kind, and their cost."""

    num_preemptions: dict[str, int] = field(default_factory=lambda: {"recompute": 0, "swap": 0})
    num_recomputed_tokens: int = 0  # computed once, freed, and not found in the cache
    swap_s: float = 0.0             # spent on moving blocks: measured by the worker
    recompute_s: float = 0.0        # spent on computing tokens again: from the rate of prefills
    saved_s: float = 0.0            # what the other kind would have cost more, where `auto` chose


class PreemptionPolicy:
    """Chooses the kind of each preemption, and counts both kinds and their cost. Seconds come from the worker."""

    def __init__(self, mode: PreemptionMode, block_size: int) -> None:
        self._mode = mode
        self._block_size = block_size
        self.rates = UNMEASURED         # the last step's
        self.stats = PreemptionStats()

    def choose(self, request: Request, footprint: Footprint, num_free_swap_blocks: int) -> PreemptionKind:
        """Choose for a victim that holds such blocks, and count it as preempted.

        It is computed again where the swap space has no room for all of them, or the worker keeps more than its blocks.
        """
        kind: PreemptionKind = "recompute"
        if self._mode != "recompute" and not request.keeps_state and 0 < footprint.num_blocks <= num_free_swap_blocks:
            kind = "swap" if self._mode == "swap" else self._cheaper(footprint, _num_computed_tokens(request))
        self.count(kind)
        return kind

    def count(self, kind: PreemptionKind) -> None:
        """Count a preemption by its kind."""
        self.stats.num_preemptions[kind] += 1

    def record_resumed(self, sequence: Sequence, num_known: int) -> int:
        """Count, and return, what a sequence had computed, has lost and now computes again past its first tokens."""
        num_tokens = max(0, sequence.num_lost_tokens - num_known)
        sequence.num_lost_tokens = 0
        self.stats.num_recomputed_tokens += num_tokens
        if self.rates.prefill_tokens_per_s is not None:
            self.stats.recompute_s += num_tokens / self.rates.prefill_tokens_per_s
        return num_tokens

    def _cheaper(self, footprint: Footprint, num_tokens: int) -> PreemptionKind:
        tokens_per_s, blocks_out_per_s, blocks_in_per_s, _ = self.rates
        if tokens_per_s is None or blocks_out_per_s is None or blocks_in_per_s is None:
            return "swap"
        num_blocks_back = footprint.num_blocks - footprint.num_held_by_others
        swap_s = footprint.num_blocks / blocks_out_per_s + num_blocks_back / blocks_in_per_s
        recompute_s = max(0, num_tokens - footprint.num_held_by_others * self._block_size) / tokens_per_s
        self.stats.saved_s += abs(swap_s - recompute_s)
        return "swap" if swap_s < recompute_s else "recompute"


def _num_computed_tokens(request: Request) -> int:
    """Return how many tokens a sequence group has computed, the prompt once for all branches."""
    first, *rest = request.live
    return first.num_computed_tokens + sum(max(0, o.num_computed_tokens - o.num_prompt_tokens) for o in rest)
