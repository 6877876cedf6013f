"""The persistent batch: what a plan changes stays, and each step's inputs are gathered from it."""

import numpy as np
import pytest

from quire.core.plan import NewRow, RowFork, StepPlan
from quire.core.sampling_params import SamplingParams
from quire.core.token_ids import TokenIds, pack_tokens
from quire.execution.batch import PersistentBatch

BLOCK_SIZE = 4


def new_row(row: int, tokens: list[int], blocks: list[int], **params: int) -> NewRow:
    return NewRow(row, tokens, len(tokens), blocks, SamplingParams(**params), seed=row)


@pytest.fixture
def batch() -> PersistentBatch:
    return PersistentBatch(max_num_seqs=4, max_model_len=12, block_size=BLOCK_SIZE, vocab_size=100)


def test_prefill_and_decode_stand_side_by_side_in_one_flat_batch(batch: PersistentBatch) -> None:
    batch.apply(StepPlan(new_rows=[new_row(2, [5, 6, 7, 8, 9], [3, 1]), new_row(0, [20, 21, 22], [])]))
    plan = StepPlan(
        table_rows=[0], table_columns=[0], table_blocks=[7], rows=[2, 0], starts=[4, 0], counts=[1, 3],
        sample_rows=[2, 0], sample_tokens=[0, 3],
    )  # fmt: skip
    batch.apply(plan)
    inputs = batch.inputs(plan)
    forward = inputs.forward
    assert forward.token_ids.tolist() == [9, 20, 21, 22]
    assert forward.positions.tolist() == [4, 0, 1, 2]
    assert forward.slot_mapping.tolist() == [1 * BLOCK_SIZE, 28, 29, 30]
    assert forward.query_starts.tolist() == [0, 1, 4]
    assert forward.context_lens.tolist() == [5, 3]
    assert forward.block_tables.tolist()[0] == [3, 1]
    assert inputs.logit_rows.tolist() == [0, 3]
    assert inputs.sample_num_tokens.tolist() == [5, 3]


def test_rows_that_are_read_are_those_from_the_first_sample_on_or_all_of_scored_prompts(batch: PersistentBatch) -> None:
    scored = new_row(3, [1, 2, 3], [2], prompt_logprobs=1)
    batch.apply(StepPlan(new_rows=[new_row(row, list(range(9)), [0, 1, 3]) for row in range(3)] + [scored]))
    rows = StepPlan(
        rows=[1, 0, 3, 2], starts=[0, 4, 0, 2], counts=[4, 5, 2, 6], sample_rows=[0, 2], sample_tokens=[6, 16]
    )
    assert batch.inputs(rows).forward.num_read.tolist() == [0, 3, 2, 1]
    decodes = StepPlan(rows=[0, 2], starts=[8, 8], counts=[1, 1], sample_rows=[0, 2], sample_tokens=[0, 1])
    assert batch.inputs(decodes).forward.num_read is None


def test_sampled_tokens_become_the_next_inputs(batch: PersistentBatch) -> None:
    plan = StepPlan(
        new_rows=[new_row(1, [4, 5], [0])], rows=[1], starts=[0], counts=[2], sample_rows=[1], sample_tokens=[1]
    )
    batch.apply(plan)
    batch.record(batch.inputs(plan), [42])
    following = StepPlan(rows=[1], starts=[2], counts=[1], sample_rows=[1], sample_tokens=[0])
    assert batch.inputs(following).forward.token_ids.tolist() == [42]


def test_branches_sample_from_the_same_row_of_logits(batch: PersistentBatch) -> None:
    rows = [new_row(row, [4, 5, 6], [0], n=3) for row in range(3)]
    plan = StepPlan(
        new_rows=rows, rows=[0], starts=[0], counts=[3], sample_rows=[0, 1, 2], sample_tokens=[2, 2, 2]
    )
    batch.apply(plan)
    inputs = batch.inputs(plan)
    assert inputs.logit_rows.tolist() == [2, 2, 2]
    batch.record(inputs, [7, 8, 9])
    assert batch.token_ids[:3, 3].tolist() == [7, 8, 9]


def test_new_row_replaces_all_that_its_last_owner_left(batch: PersistentBatch) -> None:
    batch.apply(StepPlan(new_rows=[new_row(0, [1, 2, 3], [5], prompt_logprobs=3)]))
    batch.apply(StepPlan(new_rows=[new_row(0, [9], [6])]))
    assert batch.num_prompt_tokens[0] == 1
    assert batch.prompt_logprobs[0] == -1
    assert batch.block_tables[0, 0] == 6


def test_new_row_scores_no_tokens_that_its_last_owner_named(batch: PersistentBatch) -> None:
    named = SamplingParams(prompt_logprob_token_ids=[[7], [8, 9]], max_tokens=1)
    batch.apply(StepPlan(new_rows=[NewRow(0, [1, 2, 3], 3, [5], named, seed=0)]))
    assert batch.named_ids(0, 0, 3) is not None
    batch.apply(StepPlan(new_rows=[new_row(0, [4, 5, 6], [5], prompt_logprobs=1)]))
    assert batch.scores_prompt[0]
    assert batch.named_ids(0, 0, 3) is None


def test_token_past_the_full_length_has_no_place_and_needs_none(batch: PersistentBatch) -> None:
    plan = StepPlan(
        new_rows=[new_row(0, list(range(12)), [0, 1, 2])], rows=[0], starts=[0], counts=[12],
        sample_rows=[0], sample_tokens=[11],
    )  # fmt: skip
    batch.apply(plan)
    before = batch.token_ids.copy()
    batch.record(batch.inputs(plan), [77])
    np.testing.assert_array_equal(batch.token_ids, before)


def test_forked_row_goes_on_from_another_with_a_token_of_its_own(batch: PersistentBatch) -> None:
    rows = [
        NewRow(row, [1, 2, *output], 2, blocks, SamplingParams(), seed=row)
        for row, output, blocks in ((0, [3, 4, 5], [3, 1]), (1, [9, 9, 9], [2, 2]))
    ]
    batch.apply(StepPlan(new_rows=rows))
    batch.apply(StepPlan(row_forks=[RowFork(1, 0, 5, 70, [3, 1]), RowFork(0, 0, 5, 60, [])]))
    assert batch.token_ids[:2, :6].tolist() == [[1, 2, 3, 4, 5, 60], [1, 2, 3, 4, 5, 70]]
    assert batch.block_tables[:2, :2].tolist() == [[3, 1], [3, 1]]


def test_row_that_was_forked_and_then_given_away_is_its_new_owners(batch: PersistentBatch) -> None:
    batch.apply(StepPlan(new_rows=[new_row(0, [1, 2, 3], [3]), new_row(1, [1, 2, 3], [3])]))
    batch.apply(StepPlan(row_forks=[RowFork(1, 0, 3, 70, [3])], new_rows=[new_row(1, [8, 9], [5])]))
    assert batch.token_ids[1, :2].tolist() == [8, 9]
    assert batch.block_tables[1, 0] == 5


def test_row_takes_the_output_of_a_branch_behind_the_shared_prompt(batch: PersistentBatch) -> None:
    tokens = TokenIds(pack_tokens([1, 2, 3]), [8, 9])
    branches = enumerate([tokens, TokenIds(tokens.prompt)])
    rows = [NewRow(row, each, 3, [0], SamplingParams(), seed=0) for row, each in branches]
    batch.apply(StepPlan(new_rows=rows))
    assert batch.token_ids[0, :6].tolist() == [1, 2, 3, 8, 9, 0]
    assert batch.token_ids[1, :4].tolist() == [1, 2, 3, 0]
