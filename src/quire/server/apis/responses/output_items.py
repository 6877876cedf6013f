"""Output items from the events in the text of one output, and the events of a stream that tell how they grow."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from quire.core.logprob_table import Logprobs, LogprobTable, Position
from quire.server.api.http_responses import JsonStream, array, encode
from quire.server.api.token_logprobs import SLICE_CANDIDATES, TokenNames, slices_of, token_logprob
from quire.server.apis.responses.input_items import CUSTOM_ARGUMENT
from quire.server.apis.responses.responses_bodies import Tools
from quire.server.tools.call_reader import Arguments, CallBegan, CallEnded, Content, Event, Reasoning
from quire.server.tools.served_formats import OutputReading

Json = dict[str, Any]


class Item:
    """One item of an output: reasoning, a message or a call."""

    def __init__(self, kind: str, id_: str, output_index: int) -> None:
        self.kind, self.id, self.output_index = kind, id_, output_index
        self.status = "in_progress"
        self.call_id = self.name = ""
        self.namespace: str | None = None           # namespace of the function
        self.texts: list[str] = []                  # content or arguments so far
        self.logprobs = LogprobTable()              # logprobs of the content

    @property
    def text(self) -> str:
        """Content or arguments so far."""
        return "".join(self.texts)


class ItemWriter:
    """Turns events into items; each method yields the events of a stream as (type, fields).

    White space in front of a message is held back: between reasoning and calls it is no message.
    """

    def __init__(
        self, response_id: str, reading: OutputReading | None, tools: Tools,
        names: TokenNames | None, num_top: int,
    ) -> None:  # fmt: skip
        self.items: list[Item] = []
        self._suffix = response_id.partition("_")[2]
        self._reading, self._tools = reading, tools
        self._names, self._num_top = names, num_top  # for logprobs; None: there are none
        self._open: Item | None = None              # reasoning or a message
        self._calls: dict[int, Item] = {}           # open calls, keyed by the parser's index
        self._space = ""                            # held back
        self._positions: list[Position] = []        # tokens with no text of a message so far

    def write(self, events: Iterable[Event], positions: Iterable[Position] = ()) -> Iterator[tuple[str, Json]]:
        """Yield what the events of the next tokens add."""
        self._positions += positions
        for event in events:
            match event:
                case Content(text):
                    yield from self._add_content(text)
                case Reasoning(text):
                    self._positions.clear()
                    yield from self._add_reasoning(text)
                case CallBegan(index, name):
                    self._positions.clear()
                    yield from self._begin_call(index, name)
                case Arguments(index, text):
                    self._positions.clear()
                    yield from self._add_arguments(self._calls[index], text)
                case CallEnded(index):
                    yield from self._end_call(self._calls.pop(index), "completed")

    def finish(self, status: str) -> Iterator[tuple[str, Json]]:
        """Yield the end of the items that are open. An output of nothing else is an empty message."""
        if not self.items:
            yield from self._begin("message", "msg")
            yield from self._add_text(self._space)
        yield from self._close(status)
        for call in self._calls.values():
            yield from self._end_call(call, "incomplete")
        self._calls.clear()

    def abandon(self) -> None:
        """End all items at once, without logprobs."""
        self._names, self._open = None, None
        for item in self.items:
            item.status = "incomplete" if item.status == "in_progress" else item.status

    def item_json(self, item: Item) -> Json:
        """Return an item as it is so far; the content of one that has just begun is empty."""
        head: Json = {"id": item.id, "type": item.kind, "status": item.status}
        content = [self._part(item)] if item.status != "in_progress" else []
        match item.kind:
            case "message":
                return head | {"role": "assistant", "content": content}
            case "reasoning":
                return head | {"summary": [], "content": content, "encrypted_content": None}
            case "function_call":
                return head | _named(item) | {"arguments": item.text}
        text = "" if item.status == "in_progress" else _custom_input(item.text)
        return head | _named(item) | {"input": text}

    def _add_content(self, text: str) -> Iterator[tuple[str, Json]]:
        if self._open is None or self._open.kind != "message":
            text, self._space = self._space + text, ""
            if text.isspace() or not text:
                self._space = text
                return
            yield from self._close("completed")
            yield from self._begin("message", "msg")
            self._drop_positions(len(text))
        yield from self._add_text(text)

    def _drop_positions(self, num_chars: int) -> None:
        """Drop the logprobs of tokens, such as markers, in front of a message's first text."""
        if self._names is None:
            return
        lengths = [len(self._names.text(token_ids[0])) for token_ids, _, _ in self._positions]
        excess, num_dropped = sum(lengths) - num_chars, 0
        while num_dropped < len(lengths) and excess >= lengths[num_dropped]:
            excess -= lengths[num_dropped]
            num_dropped += 1
        del self._positions[:num_dropped]

    def _add_reasoning(self, text: str) -> Iterator[tuple[str, Json]]:
        if self._reading is None or not self._reading.shows_reasoning:
            return
        if self._open is None or self._open.kind != "reasoning":
            yield from self._close("completed")
            yield from self._begin("reasoning", "rs")
        yield from self._add_text(text)

    def _begin(self, kind: str, prefix: str) -> Iterator[tuple[str, Json]]:
        """Open an item with one content part."""
        item = self._open = self._new(kind, prefix)
        yield "response.output_item.added", {"output_index": item.output_index, "item": self.item_json(item)}
        yield "response.content_part.added", self._at(item) | {"part": self._part(item)}

    def _add_text(self, text: str) -> Iterator[tuple[str, Json]]:
        item = self._open
        assert item is not None, "text is added to an item"
        item.texts.append(text)
        fields: Json = self._at(item) | {"delta": text}
        if item.kind == "reasoning":
            yield "response.reasoning_text.delta", fields
            return
        item.logprobs.extend(self._positions)
        yield "response.output_text.delta", fields | {"logprobs": self._logprobs(LogprobTable.of(self._positions))}
        self._positions.clear()

    def _close(self, status: str) -> Iterator[tuple[str, Json]]:
        """End the open reasoning or message."""
        item, self._open, self._space = self._open, None, ""
        if item is None:
            return
        item.status = status
        fields = self._at(item) | {"text": item.text}
        if item.kind == "reasoning":
            yield "response.reasoning_text.done", fields
        else:
            yield "response.output_text.done", fields | {"logprobs": self._logprobs(item.logprobs)}
        yield "response.content_part.done", self._at(item) | {"part": self._part(item)}
        yield "response.output_item.done", {"output_index": item.output_index, "item": self.item_json(item)}

    def _begin_call(self, index: int, name: str) -> Iterator[tuple[str, Json]]:
        assert self._reading is not None, "an output without a reading has no calls"
        yield from self._close("completed")
        is_custom = name in self._tools.custom
        item = self._new("custom_tool_call" if is_custom else "function_call", "ctc" if is_custom else "fc")
        item.namespace, item.name = self._tools.namespaces.get(name, (None, name))
        item.call_id = self._reading.call_id(name, index)
        self._calls[index] = item
        yield "response.output_item.added", {"output_index": item.output_index, "item": self.item_json(item)}

    def _add_arguments(self, item: Item, text: str) -> Iterator[tuple[str, Json]]:
        item.texts.append(text)
        if item.kind == "function_call" and text:
            fields = {"item_id": item.id, "output_index": item.output_index, "delta": text}
            yield "response.function_call_arguments.delta", fields

    def _end_call(self, item: Item, status: str) -> Iterator[tuple[str, Json]]:
        item.status = status
        where = {"item_id": item.id, "output_index": item.output_index}
        if item.kind == "function_call":
            done = where | {"name": item.name, "arguments": item.text}
            yield "response.function_call_arguments.done", done
        else:
            text = _custom_input(item.text)
            yield "response.custom_tool_call_input.delta", where | {"delta": text}
            yield "response.custom_tool_call_input.done", where | {"input": text}
        yield "response.output_item.done", {"output_index": item.output_index, "item": self.item_json(item)}

    def _new(self, kind: str, prefix: str) -> Item:
        item = Item(kind, f"{prefix}_{self._suffix}{len(self.items):02x}", len(self.items))
        self.items.append(item)
        return item

    @staticmethod
    def _at(item: Item) -> Json:
        return {"item_id": item.id, "output_index": item.output_index, "content_index": 0}

    def _part(self, item: Item) -> Json:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        logprobs = self._logprobs(item.logprobs)
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, table: Logprobs) -> list[Any] | JsonStream:
        names, num_top = self._names, self._num_top
        if names is None:
            return []
        if table.num_candidates <= SLICE_CANDIDATES:
            return [token_logprob(names, position, num_top) for position in table.positions(0, len(table))]
        slices = (
            encode([token_logprob(names, position, num_top) for position in table.positions(start, stop)])
            for start, stop in slices_of(table)
        )
        return JsonStream(array(slices))


def _named(item: Item) -> Json:
    """Return the fields that name the function of a call; without a namespace there is none."""
    namespace = {} if item.namespace is None else {"namespace": item.namespace}
    return {"call_id": item.call_id, "name": item.name} | namespace


def _custom_input(arguments: str) -> str:
    """Return the text that is the one argument of a custom tool; of arguments that are cut or others, all of it."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(CUSTOM_ARGUMENT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
