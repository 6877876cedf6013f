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

    kernels: the instruction set that computes, or `cuda`; bytes_per_weight: of the model. draft_model: for the method
    of that name, with the bytes of its weights by those of the model.
    """
    if draft_model is not None:
        lengths = AdaptiveLength(StepCost.of(kernels, bytes_per_weight, draft_cost), len(batch.token_ids))
        return LimitedDrafter(
            draft_model, lengths, config.num_speculative_tokens, len(batch.token_ids), is_lookup=False
        )
    max_rows = len(batch.token_ids)
    method: Drafter = SuffixDrafter(batch.token_ids)
    if config.method == "ngram":
        method = NgramDrafter(batch.token_ids, config.prompt_lookup_min, config.prompt_lookup_max)
    lengths = AdaptiveLength(StepCost.of(kernels, bytes_per_weight), max_rows)
    return LimitedDrafter(method, lengths, config.num_speculative_tokens, max_rows, is_lookup=True)
