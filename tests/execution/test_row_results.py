"""What a step with drafts leaves of its rows, against one token after the other."""

import random

from quire.core.plan import NewRow, RowDrafts, StepPlan
from quire.core.sampling_params import SamplingParams
from quire.decoding.sampler import SampledTokens
from quire.execution.batch import PersistentBatch
from quire.execution.row_results import verified


def test_rows_keep_what_single_steps_would_have_sampled() -> None:
    """Any rows, drafts and samples; a row may compute known tokens before its drafts, or have none."""
    for seed in range(200):
        rng = random.Random(seed)
        batch = PersistentBatch(max_num_seqs=6, max_model_len=32, block_size=4, vocab_size=5)
        plan, sampled, expected, rejected = StepPlan(), list[int](), {}, set[int]()
        for row in rng.sample(range(6), rng.randint(1, 6)):
            num_known, drafts = rng.randint(1, 9), [rng.randrange(2) for _ in range(rng.choice([0, 1, 2, 5]))]
            start, first, first_token = rng.randrange(num_known), len(sampled), sum(plan.counts)
            plan.new_rows.append(NewRow(row, [3] * num_known, num_known, [0, 1, 2, 3], SamplingParams(), seed=0))
            plan.rows.append(row)
            plan.starts.append(start)
            plan.counts.append(num_known - start + len(drafts))
            own = [rng.randrange(2) for _ in range(len(drafts) + 1)]
            plan.sample_rows.extend([row] * len(own))
            plan.sample_tokens.extend(range(first_token + num_known - start - 1, sum(plan.counts)))
            sampled += own
            if drafts:
                plan.drafts.append(RowDrafts(row, num_known, drafts))
                num_kept = 1
                while num_kept < len(own) and drafts[num_kept - 1] == own[num_kept - 1]:
                    num_kept += 1
                expected[row] = own[:num_kept], num_known - start + num_kept - 1
                rejected |= set(range(first + num_kept, first + len(own)))
        batch.apply(plan)
        results, found = verified(batch.inputs(plan), SampledTokens(sampled, None))
        assert {row: (each.token_ids, each.num_computed) for row, each in results.items()} == expected, seed
        assert found == rejected, seed
