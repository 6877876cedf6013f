"""Results of rows that give several tokens or none: verified drafts, forced tokens, ends of grammars, late masks.

A row without such a result gives the one token that was sampled for it; most steps have no other rows.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import structs

from quire.core.deltas import TokenLogprobs
from quire.core.plan import RowResult
from quire.decoding.grammars.row_state import RowProgress
from quire.decoding.grammars.rows import StepMasks
from quire.decoding.sampler import SampledTokens
from quire.execution.batch import PersistentBatch, StepInputs
from quire.execution.drafter import Drafter, rows_to_draft


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of the drafts equal the sampled tokens, before the first that differs.

    `sampled` has one token more: sample i stands at the position of draft i, the last one behind all drafts.
    """
    assert len(sampled) == len(drafts) + 1, f"{len(sampled)} samples for {len(drafts)} drafts"
    differing = (index for index, draft in enumerate(drafts) if draft != sampled[index])
    return next(differing, len(drafts))


GRAMMAR_FIELD = "structured_outputs"  # request field at fault for a failure


def verified(inputs: StepInputs, sampled: SampledTokens) -> tuple[dict[int, RowResult], set[int]]:
    """Return the results of rows with drafts, those of single steps, and the samples behind rejected drafts."""
    first_samples = {row: index for index, row in reversed(list(enumerate(inputs.sample_rows.tolist())))}
    starts = dict(zip(inputs.rows.tolist(), inputs.starts.tolist(), strict=True))
    results, rejected = dict[int, RowResult](), set[int]()
    for row, start, drafts in inputs.drafts:
        first = first_samples[row]
        end = first + len(drafts) + 1
        num_kept = 1 + num_accepted(drafts, sampled.token_ids[first:end])
        kept = slice(first, first + num_kept)
        logprobs = None if sampled.logprobs is None else [each for each in sampled.logprobs[kept] if each is not None]
        results[row] = RowResult(sampled.token_ids[kept], logprobs or None, start - starts[row] + num_kept - 1)
        rejected.update(range(first + num_kept, end))
    return results, rejected


def late_rows(inputs: StepInputs, late: Collection[int], results: Mapping[int, RowResult]) -> dict[int, RowResult]:
    """Return the results of rows with late masks. `results`: of rows with drafts, which are not kept."""
    num_kept = dict[int, int | None]()
    for index in late:
        row = int(inputs.sample_rows[index])
        own = results.get(row)
        assert own is None or own.num_computed is not None, f"row {row} has a result, and a mask that is late"
        num_kept[row] = None if own is None or own.num_computed is None else own.num_computed + 1 - len(own.token_ids)
    return {row: RowResult(num_computed=num_computed, is_late=True) for row, num_computed in num_kept.items()}


def advance_grammars(
    batch: PersistentBatch, inputs: StepInputs, grammars: StepMasks, sampled: SampledTokens,
    results: Mapping[int, RowResult], failures: dict[int, str], at_fault: dict[int, str],
) -> dict[int, RowResult]:  # fmt: skip
    """Return the results of rows with grammars that have ended, or force tokens, which are written into their rows.

    `results`: of rows with drafts. Adds the rows with grammars that cannot continue to `failures` and `at_fault`.
    """
    changed, max_len = dict[int, RowResult](), batch.token_ids.shape[1]
    for index in grammars.masks().samples.tolist():
        row = int(inputs.sample_rows[index])
        if row in changed or row in failures:
            continue
        result = results.get(row) or RowResult([sampled.token_ids[index]], _record_of(sampled, index))
        behind = int(inputs.sample_num_tokens[index]) + len(result.token_ids)
        progress = grammars.advance(row, result.token_ids, max_len - behind)
        assert progress is not None, f"row {row} has a mask and no grammar"
        if progress.failure is not None:
            failures[row] = progress.failure
            at_fault |= {row: GRAMMAR_FIELD} if progress.is_at_fault else {}
        elif progress.has_ended or progress.forced or row in results:
            changed[row] = _with_progress(result, progress)
            batch.append(row, behind, progress.forced)
    return changed


def add_drafts(
    drafter: Drafter, inputs: StepInputs, sampled: SampledTokens, results: dict[int, RowResult],
    failures: Mapping[int, str],
) -> None:  # fmt: skip
    """Add the drafts of rows that continue to their results. Rows without drafts need no result of their own."""
    for row, _, token_ids in inputs.drafts:
        if row not in failures and not results[row].is_late:
            drafter.record(row, len(token_ids), max(len(results[row].token_ids) - 1, 0))
    drafts = drafter.draft(rows_to_draft(inputs, results, failures), inputs)
    if not drafts:
        return
    samples = {row: index for index, row in enumerate(inputs.sample_rows.tolist())}
    for row, drafted in drafts.items():
        num_allowed = len(drafted) if inputs.grammars is None else inputs.grammars.num_allowed(row, drafted)
        if num_allowed > 0:
            index = samples[row]    # the only one of a row without a result
            own = results.get(row) or RowResult([sampled.token_ids[index]], _record_of(sampled, index))
            results[row] = structs.replace(own, drafts=list(drafted[:num_allowed]))


def _record_of(sampled: SampledTokens, index: int) -> list[TokenLogprobs] | None:
    """Return the logprobs of one sample as those of a row."""
    record = None if sampled.logprobs is None else sampled.logprobs[index]
    return None if record is None else [record]


def _with_progress(result: RowResult, progress: RowProgress) -> RowResult:
    """Return the result of a row up to the end of its grammar, with the tokens that are forced."""
    kept = progress.num_kept
    logprobs = None if result.logprobs is None else result.logprobs[:kept]
    forced = list(progress.forced)
    return structs.replace(
        result, token_ids=result.token_ids[:kept], logprobs=logprobs, has_ended=progress.has_ended, forced=forced
    )
