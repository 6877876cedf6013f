"""Entry of the package: the drafter of a configuration."""

from quire.core.speculation import SpeculationConfig
from quire.execution.batch import PersistentBatch
from quire.execution.drafter import Drafter
from quire.execution.drafting.draft_model import DraftModel
from quire.execution.drafting.lengths import AdaptiveLength
from quire.execution.drafting.limited import LimitedDrafter
from quire.execution.drafting.lookup import Lookup, LookupDrafter
from quire.execution.drafting.ngram import NgramLookup
from quire.execution.drafting.step_cost import StepCost
from quire.execution.drafting.suffix import RULES, ScopedLookup, SuffixTexts
from quire.kernels.cpp.back_end import usable_isas
from quire.model.weight_counts import ExpertReads


def make_drafter(
    config: SpeculationConfig, batch: PersistentBatch, kernels: str, bytes_per_weight: float,
    draft_model: DraftModel | None = None, draft_cost: float = 0.0, experts: ExpertReads | None = None,
) -> Drafter:  # fmt: skip
    """Return the drafter for the rows of a batch.

    kernels: the instruction set that computes, or `cuda`; bytes_per_weight: of the model. draft_model: drafter of the
    method `draft_model`; draft_cost: bytes of its weights divided by those that a row of the model reads. experts: as a
    step reads them.
    """
    cost = StepCost.of(kernels, bytes_per_weight, draft_cost, experts)
    lengths = AdaptiveLength(cost, len(batch.token_ids))
    if draft_model is not None:
        return LimitedDrafter(draft_model, lengths, config.num_speculative_tokens, batch)
    return LookupDrafter(make_lookup(config, batch, is_native=bool(usable_isas())), lengths)


def make_lookup(config: SpeculationConfig, batch: PersistentBatch, *, is_native: bool) -> Lookup:
    """Return the lookup of a method, in C++ or in its plain form."""
    tokens, num_drafts = batch.token_ids, config.num_speculative_tokens
    sizes = config.prompt_lookup_min, config.prompt_lookup_max
    if not is_native:
        is_ngram = config.method == "ngram"
        return NgramLookup(tokens, num_drafts, *sizes) if is_ngram else ScopedLookup(SuffixTexts(tokens, num_drafts))
    from quire.kernels.cpp import lookup as native  # noqa: PLC0415 (the extension is optional)

    if config.method == "ngram":
        return native.NgramLookup(tokens, num_drafts, *sizes)
    return ScopedLookup(native.SuffixTexts(tokens, num_drafts, RULES))
