"""Output of one branch of a request so far: text, tokens, logprobs and finish reason."""

from collections.abc import Sequence

from quire.core.deltas import FinishReason, SequenceDelta, TokenLogprobs
from quire.core.logprob_table import LogprobBuffer, Position
from quire.core.outputs import CompletionOutput, Logprob
from quire.core.sampling_params import SamplingParams
from quire.engine.requests.reasoning_gate import ReasoningMarkers
from quire.engine.requests.stop_strings import StopMatcher, StopStringFinder
from quire.text.detokenizer import IncrementalDetokenizer, incremental_detokenizer
from quire.text.tokenizer import Tokenizer


class CompletionBuilder:
    """One choice of a request, extended by deltas until it ends; later deltas are ignored.

    `tokenizer` is None where no text is wanted or possible. Text that may begin a stop string is not yet in `text`.
    Read it by `snapshot` or by `drain`, never by both. `matcher` is that of the request's stop strings, shared by its
    branches; None if it has none. With `packs_logprobs`, outputs have `packed_logprobs` instead of `logprobs`. Special
    tokens among `kept_token_ids` are text in any case. Stop strings are looked for behind the `reasoning`.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams,
        matcher: StopMatcher | None, *, packs_logprobs: bool, kept_token_ids: frozenset[int] = frozenset(),
        reasoning: ReasoningMarkers | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = incremental_detokenizer(
                tokenizer, prompt_token_ids, params.skip_special_tokens, kept_token_ids
            )
        self._stops: StopStringFinder | None = None
        if matcher is not None:
            include = params.include_stop_str_in_output
            self._stops = StopStringFinder(matcher, include=include, reasoning=reasoning)
        self.num_tokens = 0                             # all tokens, drained or not
        self.last_token_s: float | None = None          # set by the caller of `extend`
        self.has_new_output = False                     # since the last drain
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        has_logprobs = params.logprobs is not None
        self._logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs and not packs_logprobs else None
        self._packed: LogprobBuffer | None = LogprobBuffer() if has_logprobs and packs_logprobs else None

    def extend(self, delta: SequenceDelta) -> None:
        """Append the tokens of a step, up to the one that completes a stop string."""
        self.has_new_output = True
        if self._stops is None:
            self._append_tokens(delta.token_ids, delta.logprobs)
            visible = delta.token_ids if delta.finish_reason is None else self._text_tokens(delta)
            if self._detokenizer is not None and visible:
                self._pieces.append(self._detokenizer.append(visible))
        else:
            self._extend_to_stop(delta)
        if delta.cumulative_logprob is not None:
            self._cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None and self.finish_reason is None:
            self.finish(delta.finish_reason, delta.stop_reason)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the branch. Text that was held back is appended, unless it completes a stop string."""
        self.finish_reason, self._stop_reason, self.has_new_output = reason, stop_reason, True
        if self._detokenizer is None:
            return
        text = self._detokenizer.finish()
        if self._stops is None:
            self._pieces.append(text)
            return
        if not self._find_stop(self._stops, text, is_last=True):
            self._pieces.append(self._stops.flush())

    def snapshot(self) -> CompletionOutput:
        """Return the whole output so far, in new lists except for packed logprobs.

        Linear in the length of the output.
        """
        self._pieces = ["".join(self._pieces)]
        return self._output(self._token_ids.copy(), None if self._logprobs is None else self._logprobs.copy())

    def drain(self) -> CompletionOutput:
        """Return the output since the last drain; `cumulative_logprob` is that of all tokens."""
        output = self._output(self._token_ids, self._logprobs)
        self._pieces, self._token_ids, self.has_new_output = [], [], False
        self._logprobs = None if self._logprobs is None else []
        self._packed = None if self._packed is None else LogprobBuffer()
        return output

    def _output(self, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            packed_logprobs=self._packed,
        )

    def _append_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Append tokens and, if requested, their logprobs."""
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)
        if self._cumulative_logprob is None:
            return
        assert logprobs is not None, "logprobs were requested and are missing"
        assert len(logprobs) == len(token_ids), f"{len(logprobs)} logprobs for {len(token_ids)} tokens"
        for position in logprobs:
            self._cumulative_logprob += position.logprobs[0]
        if self._packed is not None:
            self._packed.extend(logprobs)
        elif self._logprobs is not None:
            self._logprobs += [logprob_dict(position, self._tokenizer) for position in logprobs]

    def _text_tokens(self, delta: SequenceDelta) -> list[int]:
        """Return the tokens that become text: all but a stop token, unless include_stop_str_in_output is set."""
        has_stop_token = delta.finish_reason == "stop" and not delta.ends_with_text
        if has_stop_token and not self._params.include_stop_str_in_output:
            return delta.token_ids[:-1]
        return delta.token_ids

    def _extend_to_stop(self, delta: SequenceDelta) -> None:
        """Append tokens one by one, up to the one that completes a stop string."""
        assert self._detokenizer is not None, "stop strings are found in text"
        assert self._stops is not None, "there are stop strings"
        num_visible = len(self._text_tokens(delta))
        for position, token_id in enumerate(delta.token_ids):
            logprobs = None if delta.logprobs is None else delta.logprobs[position : position + 1]
            self._append_tokens([token_id], logprobs)
            if position < num_visible:
                self._find_stop(self._stops, self._detokenizer.append([token_id]))
            if self.finish_reason is not None:
                return

    def _find_stop(self, stops: StopStringFinder, text: str, *, is_last: bool = False) -> bool:
        """Append the text of the last token, or end before (or after) the stop string that it completes, if any.

        As with stop tokens, the first token that may end the branch is the `min_tokens`-th. Reasoning is not searched.
        """
        may_stop = self.num_tokens >= self._params.min_tokens
        certain, stop = stops.feed(text, may_stop=may_stop, is_last=is_last)
        self._pieces.append(certain)
        if stop is not None:
            self.finish_reason, self._stop_reason = "stop", stop
        return stop is not None


def logprob_dict(position: Position, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return the candidates of one position by token id, the token of that position first."""
    return {
        token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))
        for token_id, logprob, rank in zip(*position, strict=True)
    }
