"""Rows of the tables of formats.

A call is written as a template says. Its fields: `{name}`; `{arguments}` in the notation of the row; `{call}`, an
object with name and arguments, `{calls}`, a list of such; `{list}`, a list of calls in Python; `{parameters}`, one
text by the template `parameter` for each, with `{key}`, `{type}` and `{value}`; `{index}`, a number. White space of a
template is written as it is, and may be missing or differ where it is read; `{?text}` and `{:index}` are written, and
may be missing.
"""

import re
from dataclasses import dataclass
from typing import Literal

_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

TYPE_NAMES: dict[type, str] = {  # as formats and schemas write them
    bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object", list: "array"
}  # fmt: skip


@dataclass(frozen=True)
class ToolFormat:
    """The way in which models of a family write tool calls."""

    name: str
    models: str  # for the documentation
    call: str
    parameter: str = ""
    section: tuple[str, str] = ("", "")  # around all calls, and only calls; special tokens, which text never contains
    separator: str = "\n"  # between calls, and between those of a list
    notation: Literal["json", "tagged", "python", "gemma"] = "json"
    variants: tuple[str, ...] = ()  # templates of calls that are read too
    skips_space: bool = False  # white space in front of calls is no content, even if `call` does not begin with it
    drops: tuple[str, ...] = ()  # markers around content that are no part of it
    keys: tuple[str, str] = ("name", "arguments")  # keys of `{call}`; `parameters` and `arguments` are both read
    index_key: str = ""  # key of a number in `{call}`, a text in front of the name
    has_name_as_key: bool = False  # `{call}` is an object with one key, the name; its value are the arguments
    quote: str = '<|"|>'  # around strings in Gemma's notation
    is_escaped: bool = False  # names and keys are escaped as in XML
    has_channels: bool = False  # the output is a sequence of messages with headers, as in Harmony
    aliases: tuple[str, ...] = ()  # names of vLLM's parsers for it
    fingerprints: tuple[tuple[str, ...], ...] = ()  # any of these groups: texts that a chat template has all of
    model_types: tuple[str, ...] = ()  # `model_type` of config.json, where the chat template says nothing

    @property
    def is_bare(self) -> bool:
        """Return whether calls begin without a marker: then they are calls only at the start and of known tools."""
        return self.call.startswith("{")

    @property
    def marker_texts(self) -> tuple[str, ...]:
        """Return the texts that the format consists of: special tokens that are part of one are kept in the text."""
        templates = (self.call, self.parameter, *self.variants, *self.section, *self.drops)
        texts = (text for template in templates for text in re.split(r"\{[^}]*\}", template))
        extra = (*(_HARMONY if self.has_channels else ()), *([self.quote] if self.notation == "gemma" else []))
        return (*dict.fromkeys(text for text in texts if text), *extra)


@dataclass(frozen=True)
class ReasoningFormat:
    """The way in which models of a family mark their reasoning."""

    name: str
    models: str
    markers: tuple[tuple[str, str], ...]  # start and end; the first pair is written, all are read
    ends: tuple[str, ...] = ()  # markers of what follows, which end the reasoning without being part of its end
    is_open_from_start: bool = False  # models that reason without a start marker, in the prompt or the output
    drops: tuple[str, ...] = ()  # markers around the content that follows
    may_call: bool = True  # calls inside of reasoning are calls; False: text
    has_channels: bool = False
    aliases: tuple[str, ...] = ()
    fingerprints: tuple[tuple[str, ...], ...] = ()
    model_types: tuple[str, ...] = ()

    @property
    def marker_texts(self) -> tuple[str, ...]:
        """Return the texts that the format consists of: special tokens that are part of one are kept in the text."""
        pairs = (text for pair in self.markers for text in pair)
        return (*pairs, *self.ends, *self.drops, *(_HARMONY if self.has_channels else ()))

    def starts(self, prompt: str) -> bool:
        """Return whether the output starts inside of reasoning: by the end of the rendered prompt alone."""
        prompt = prompt[-256:].rstrip()
        if prompt.endswith(tuple(start.rstrip() for start, _ in self.markers)):
            return not self.has_channels
        return self.is_open_from_start and not prompt.endswith(tuple(end.rstrip() for _, end in self.markers))
