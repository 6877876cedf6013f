"""A fake executor whose rows give any number of tokens: the right ones, so that answers stay those of single steps."""

import random
from typing import Any

from msgspec import structs

from quire.core.plan import RowResult, StepPlan, StepResult
from support.fake_executor import VOCAB_SIZE, FakeExecutor, next_token


class RaggedExecutor(FakeExecutor):
    """Draws several tokens or none, forces tokens, drafts some right and some wrong ones, computes less than planned.

    States hold what was planned: with them rows compute all of it, and are late with grammars alone.
    `end_rate`: how often a row says that its sequence has ended. `late_rate`: how often a row is late.
    """

    def __init__(self, *sizes: Any) -> None:  # noqa: ANN401
        super().__init__(*sizes)
        self._rng = random.Random(7)
        self.end_rate, self.late_rate = 0.0, 0.1
        self.num_drafted = self.num_accepted = self.num_late = 0

    def collect(self) -> StepResult:
        plan = self._plans[0]
        result = super().collect()
        rows = dict(result.rows)
        self.num_drafted += sum(len(each.token_ids) for each in plan.drafts)
        self.num_accepted += sum(len(each.token_ids) - 1 for each in rows.values())
        for row in dict.fromkeys(plan.sample_rows):
            if self._rows[row].beam is None and self._rng.random() < 0.6:
                known = rows.get(row) or RowResult([result.token_ids[plan.sample_rows.index(row)]])
                rows[row] = self._altered(plan, row, known)
        for row, count in zip(plan.rows, plan.counts, strict=True):
            if row not in plan.sample_rows and not self._is_bound(plan) and self._rng.random() < 0.3:
                rows[row] = RowResult(num_computed=self._rng.randint(0, count))
        return structs.replace(result, rows=rows)

    def _is_bound(self, plan: StepPlan) -> bool:
        """Whether rows compute all that is planned: branches begin in this step with it, or states hold it."""
        return bool(plan.states) or any(new.row not in plan.rows for new in plan.new_rows)

    def _altered(self, plan: StepPlan, row: int, known: RowResult) -> RowResult:
        """Return another result of a row: its tokens are those of one step, of none, or of several."""
        may_be_late = not plan.states or self._rows[row].params.structured_outputs is not None
        if may_be_late and self._rng.random() < self.late_rate:
            self.num_late += 1
            del self._tokens[row][-len(known.token_ids) :]
            num_drafts = len(known.token_ids) - 1
            return RowResult(
                num_computed=None if known.num_computed is None else known.num_computed - num_drafts, is_late=True
            )
        kind = self._rng.choice(["none", "several", "forced", "drafts", "both", "ended"])
        count = dict(zip(plan.rows, plan.counts, strict=True)).get(row)
        if kind == "none" and count is not None and known.num_computed is None and not self._is_bound(plan):
            self._tokens[row].pop()
            return RowResult(num_computed=self._rng.randint(0, count - 1))
        if kind == "ended" and self._rng.random() < self.end_rate:
            return structs.replace(known, has_ended=True)
        if kind == "several":
            return structs.replace(known, token_ids=known.token_ids + self._go_on(row))
        forced = self._go_on(row) if kind in ("forced", "both") else []
        return structs.replace(known, forced=forced, drafts=self._drafts(row) if kind in ("drafts", "both") else [])

    def _go_on(self, row: int) -> list[int]:
        """Append up to three tokens that the next draws would give."""
        more = self._next_tokens(row, self._rng.randint(0, 3))
        self._tokens[row] += more
        return more

    def _drafts(self, row: int) -> list[int]:
        drafts = self._next_tokens(row, self._rng.randint(0, 5))
        if drafts and self._rng.random() < 0.5:
            drafts[self._rng.randrange(len(drafts))] = self._rng.randrange(VOCAB_SIZE)
        return drafts

    def _next_tokens(self, row: int, count: int) -> list[int]:
        tokens = self._tokens[row].copy()
        for _ in range(count):
            self._tokens[row].append(next_token(self._digest(row, len(self._tokens[row])), self._rows[row].seed))
        more = self._tokens[row][len(tokens) :]
        self._tokens[row] = tokens
        return more
