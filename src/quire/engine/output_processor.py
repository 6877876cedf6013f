"""From tokens to what a user sees: text, stop strings, logprobs, finish reasons, times.

The cut of a stop string is the truth: text, token ids, logprobs and finish reason end with the token that completed
it, even if the engine has gone on; the engine is told to end that branch. Everything grows in place; a
`RequestOutput` is built only where somebody looks at it: after each step of a streaming request, at the end of any.
"""

from collections.abc import Iterable
from typing import NamedTuple

from quire.core.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SequenceDelta,
    TokenLogprobs,
)
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.engine.stop_strings import StopStringSearch
from quire.text.detokenizer import IncrementalDetokenizer, incremental_detokenizer
from quire.text.tokenizer import Tokenizer


class ProcessedStep(NamedTuple):
    """Outputs that a step touched, and the branches (request_id, index) that a stop string has ended."""

    outputs: list[RequestOutput]
    finish: list[tuple[int, int]]


class OutputProcessor:
    """Keeps what every unfinished request has given so far."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[int, _Answer] = {}

    def add(
        self,
        request_id: int,
        *,
        external_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_s: float,
        stream: bool = False,
    ) -> None:
        """Expect deltas of a request. `stream`: its output is wanted after every step, not only at its end."""
        assert request_id not in self._answers, f"request {request_id} added twice"
        empty = RequestOutput(
            external_id, prompt, prompt_token_ids, outputs=[], finished=False, metrics=RequestMetrics(arrival_s)
        )
        branches = [_Branch(index, self._tokenizer, prompt_token_ids, params) for index in range(params.n)]
        self._answers[request_id] = _Answer(empty, branches, stream, self._tokenizer)

    def note_admitted(self, requests: Iterable[Request], now_s: float) -> None:
        """Note when requests were let in for the first time, and how often they had been thrown out before."""
        for request in requests:
            answer = self._answers.get(request.request_id)
            if answer is not None:
                answer.note_admitted(now_s, request.num_preemptions)

    def process(self, deltas: list[SequenceDelta], now_s: float) -> ProcessedStep:
        """Take a step's deltas; those of requests and branches that have ended are ignored."""
        touched: dict[int, _Answer] = {}
        finish: list[tuple[int, int]] = []
        for delta in deltas:
            answer = self._answers.get(delta.request_id)
            if answer is None or answer.branches[delta.index].finish_reason is not None:
                continue
            if answer.take(delta, now_s) and delta.finish_reason is None:
                finish.append((delta.request_id, delta.index))
            if answer.is_streamed or answer.is_finished:
                touched[delta.request_id] = answer
        outputs = []
        for request_id, answer in touched.items():
            outputs.append(answer.output(now_s))
            if answer.is_finished:
                del self._answers[request_id]
        return ProcessedStep(outputs, finish)

    def abort(self, request_id: int, now_s: float) -> RequestOutput:
        """End a request from outside: branches that have not finished get the reason "abort"."""
        answer = self._answers.pop(request_id)
        for branch in answer.branches:
            branch.finish_reason = branch.finish_reason or "abort"
        return answer.output(now_s)


class _Branch:
    """One growing answer."""

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._text: list[str] = []
        self._min_tokens = params.min_tokens
        self._shows_stop = params.include_stop_str_in_output
        self._search = StopStringSearch(tuple(params.stop or ()), keep_stop=self._shows_stop)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = incremental_detokenizer(tokenizer, prompt_token_ids, params.skip_special_tokens)

    @property
    def text(self) -> str:
        """All text that may be shown."""
        return "".join(self._text)

    def take(self, delta: SequenceDelta) -> None:
        """Append a delta's tokens, up to the one that completes a stop string."""
        for position, token in enumerate(delta.token_ids):
            self.token_ids.append(token)
            if delta.logprobs is not None:
                self.logprobs.append(delta.logprobs[position])
            is_last = delta.finish_reason is not None and position == len(delta.token_ids) - 1
            if self._detokenizer is not None:
                self._show(token, is_stop_token=is_last and delta.finish_reason == "stop")
            if self.finish_reason is not None:
                return
        if delta.finish_reason is not None:
            self._finish(delta)

    def _show(self, token: int, *, is_stop_token: bool) -> None:
        """Add a token's text. The token that ended the sequence has none, unless the user wants to see it."""
        assert self._detokenizer is not None
        if not is_stop_token or self._shows_stop:
            self._add_text(self._detokenizer.append([token]))

    def _add_text(self, text: str) -> None:
        """Show text as far as no stop string ends it. Text of the first min_tokens tokens is not searched."""
        if len(self.token_ids) < self._min_tokens:
            self._text.append(text)
            return
        shown, stop = self._search.feed(text)
        self._text.append(shown)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def _finish(self, delta: SequenceDelta) -> None:
        """End where the engine ended: release what was held back, unless its last bytes complete a stop string."""
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.finish())
            self._text.append(self._search.finish())
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class _Answer:
    """All that one request has given so far."""

    def __init__(
        self, empty: RequestOutput, branches: list[_Branch], is_streamed: bool, tokenizer: Tokenizer | None
    ) -> None:
        assert empty.metrics is not None
        self.branches = branches
        self.is_streamed = is_streamed
        self._empty = empty
        self._metrics: RequestMetrics = empty.metrics
        self._tokenizer = tokenizer

    @property
    def is_finished(self) -> bool:
        """Whether every branch has ended."""
        return all(branch.finish_reason is not None for branch in self.branches)

    def note_admitted(self, now_s: float, num_preemptions: int) -> None:
        """Take over what the scheduler knows."""
        if self._metrics.first_scheduled_s is None:
            self._metrics.first_scheduled_s = now_s
        self._metrics.num_preemptions = num_preemptions

    def take(self, delta: SequenceDelta, now_s: float) -> bool:
        """Append a delta; return whether its branch has ended with it."""
        if self._metrics.first_token_s is None:
            self._metrics.first_token_s = now_s
        if delta.prompt_logprobs is not None:
            self._empty.prompt_logprobs = [None, *map(self._logprob_dict, delta.prompt_logprobs)]
        branch = self.branches[delta.index]
        branch.take(delta)
        return branch.finish_reason is not None

    def output(self, now_s: float) -> RequestOutput:
        """Return everything so far, in lists of its own."""
        if self.is_finished:
            self._metrics.finished_s = now_s
        empty = self._empty
        return RequestOutput(
            request_id=empty.request_id,
            prompt=empty.prompt,
            prompt_token_ids=empty.prompt_token_ids,
            outputs=[self._completion(branch) for branch in self.branches],
            finished=self.is_finished,
            prompt_logprobs=empty.prompt_logprobs,
            num_cached_tokens=empty.num_cached_tokens,
            metrics=self._metrics,
        )

    def _completion(self, branch: _Branch) -> CompletionOutput:
        completion = CompletionOutput(
            index=branch.index,
            text=branch.text,
            token_ids=branch.token_ids.copy(),
            finish_reason=branch.finish_reason,
            stop_reason=branch.stop_reason,
        )
        if branch.logprobs:
            completion.logprobs = [self._logprob_dict(position) for position in branch.logprobs]
            completion.cumulative_logprob = sum(position.logprobs[0] for position in branch.logprobs)
        return completion

    def _logprob_dict(self, position: TokenLogprobs) -> dict[int, Logprob]:
        """Return the candidates at one position, the token that stands there first."""
        spell = self._tokenizer.token_text if self._tokenizer is not None else lambda _: None
        return {
            token: Logprob(logprob, rank, spell(token))
            for token, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True)
        }
