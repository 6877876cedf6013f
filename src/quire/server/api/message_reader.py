"""Reader of one message: the events in the text of one output, in slices of work, and its tokens of reasoning."""

from collections.abc import Iterator, Sequence

from quire.core.outputs import CompletionOutput
from quire.server.tools.output_events import CallBegan, CallEnded, Event, Reasoning
from quire.server.tools.served_formats import OutputReading
from quire.text.detokenizer import incremental_detokenizer
from quire.text.tokenizer import Tokenizer

SLICE_CHARS = 1 << 12   # read at once
SLICE_TOKENS = 1 << 10  # counted at once


class MessageReader:
    """Reads the text of one choice, and counts the tokens of its reasoning."""

    def __init__(self, reading: OutputReading, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> None:
        self._parser = reading.new_parser()
        self._num_calls = self._num_open = 0
        self._has_reasoning = False
        self._counter: _ReasoningCounter | None = None
        if reading.reasoning_end is not None and tokenizer is not None:
            self._counter = _ReasoningCounter(reading.reasoning_end, tokenizer, prompt_token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """Count the tokens so far up to the end of the reasoning, its markers included; 0 without reasoning."""
        return self._counter.num_tokens if self._counter is not None and self._has_reasoning else 0

    @property
    def has_complete_calls(self) -> bool:
        """Whether the message has tool calls so far, and each of them has ended."""
        return bool(self._num_calls and not self._num_open)

    def events(self, piece: CompletionOutput, *, is_last: bool) -> Iterator[list[Event]]:
        """Yield the events that the next piece of the output completes, a list for each slice of work."""
        if self._counter is not None:
            for start in range(0, len(piece.token_ids), SLICE_TOKENS):
                if start:
                    yield []
                self._counter.append(piece.token_ids[start : start + SLICE_TOKENS])
        text = piece.text
        for start in range(0, max(1, len(text)), SLICE_CHARS):
            events = self._parser.feed(text[start : start + SLICE_CHARS])
            if is_last and start + SLICE_CHARS >= len(text):
                events = [*events, *self._parser.finish()]
            for event in events:
                self._count(event)
            yield events

    def _count(self, event: Event) -> None:
        match event:
            case Reasoning():
                self._has_reasoning = True
            case CallBegan():
                self._num_calls += 1
                self._num_open += 1
            case CallEnded():
                self._num_open -= 1


class _ReasoningCounter:
    """Counts tokens up to the one that completes the marker at the end of the reasoning."""

    def __init__(self, end: str, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        self._end, self._tail, self._is_over = end, "", False
        self._detokenizer = incremental_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=False)

    def append(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        if self._is_over:
            return
        for token_id in token_ids:
            self.num_tokens += 1
            self._tail += self._detokenizer.append((token_id,))
            if self._end in self._tail:
                self._is_over = True
                return
            self._tail = self._tail[-len(self._end) :]
