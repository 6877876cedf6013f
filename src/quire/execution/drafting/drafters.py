"""Entry of the package: the drafter of a configuration."""

from quire.core.speculation import SpeculationConfig
from quire.execution.batch import PersistentBatch
from quire.execution.drafter import Drafter
from quire.execution.drafting.lengths import AdaptiveLength
from quire.execution.drafting.limited import LimitedDrafter
from quire.execution.drafting.ngram import NgramDrafter
from quire.execution.drafting.step_cost import StepCost
from quire.execution.drafting.suffix import SuffixDrafter


def make_drafter(
    config: SpeculationConfig, batch: PersistentBatch, kernels: str, bytes_per_weight: float,
    draft_model: Drafter | None = None, draft_cost: float = 0.0,
) -> Drafter:  # fmt: skip
    """Return the drafter for the rows of a batch.

    kernels: the instruction set that computes, or `cuda`; bytes_per_weight: of the model. draft_model: drafter of the
    method `draft_model`; draft_cost: bytes of its weights divided by those of the model.
    """
    max_rows, is_lookup = len(batch.token_ids), draft_model is None
    method = _lookup(config, batch) if draft_model is None else draft_model
    lengths = AdaptiveLength(StepCost.of(kernels, bytes_per_weight, draft_cost), max_rows)
    return LimitedDrafter(method, lengths, config.num_speculative_tokens, max_rows, is_lookup=is_lookup)


def _lookup(config: SpeculationConfig, batch: PersistentBatch) -> Drafter:
    """Return the drafter of a method that looks tokens up."""
    if config.method == "ngram":
        return NgramDrafter(batch.token_ids, config.prompt_lookup_min, config.prompt_lookup_max)
    return SuffixDrafter(batch.token_ids)
