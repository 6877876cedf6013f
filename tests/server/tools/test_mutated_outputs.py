"""Outputs with calls, mutated: pieces of any size give the same events, and each call that ended has a JSON object."""

import json
import random

import pytest

from quire.server.tools.call_grammar import forcing_grammar
from quire.text.tool_formats.table import TOOL_FORMATS
from quire.text.tool_formats.tool_format import ToolFormat
from support.fuzz_seeds import fuzz
from support.grammar_walks import GrammarWalk
from support.outputs import ended_calls, parse

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "maxLength": 9},
                    "number": {"type": "integer", "maximum": 999},
                    "list": {"type": "array", "maxItems": 2, "items": {"type": ["boolean", "null"]}},
                },
                "additionalProperties": False,
            },
        },
    }
    for name in ("echo", "now")
]
INSERTED = [*'"\'\\\n <{}]é1\x01', "</", "<|", "<think>", "</think>", ", ", ": "]


def mutate(output: str, generator: random.Random, row: ToolFormat) -> str:
    """Delete, repeat or insert something at random places."""
    inserted = [*INSERTED, *row.marker_texts]
    for _ in range(generator.choice((0, 1, 1, 2, 3, 5))):
        start = generator.randrange(len(output) + 1)
        stop = min(len(output), start + generator.choice((1, 3, 20)))
        kept = generator.choice(("", output[start:stop] * 2, generator.choice(inserted) + output[start:stop]))
        output = output[:start] + kept + output[stop:]
    return output


def pieces(output: str, generator: random.Random) -> list[str]:
    """Cut an output at random places."""
    result = []
    while output:
        length = generator.choice((1, 2, 5, 40))
        result.append(output[:length])
        output = output[length:]
    return result


def faults(row: ToolFormat, seed: int) -> list[str]:
    """Return what is wrong with the events of one mutated output."""
    generator = random.Random(seed)
    drawn = GrammarWalk().draw(forcing_grammar(row, TOOLS), seed % 100) or ""
    output = mutate(drawn, generator, row)
    reasoning = generator.choice(("none", "qwen3", "mistral"))
    in_reasoning = generator.random() < 0.3
    whole = parse(row.name, [output], reasoning, in_reasoning, TOOLS)
    cuts = {"pieces": pieces(output, generator), "characters": output}
    found = [name for name, cut in cuts.items() if parse(row.name, cut, reasoning, in_reasoning, TOOLS) != whole]
    if row.notation != "json":  # JSON is the model's own
        calls = [json.loads(arguments) for _, arguments in ended_calls(whole)]
        found += ["arguments"] * any(not isinstance(arguments, dict) for arguments in calls)
    return [f"{name} of {output!r}" for name in found]


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_mutated_output_in_any_pieces_gives_the_same_events(row: ToolFormat) -> None:
    assert not [fault for seed in range(8) for fault in faults(row, seed)]


@pytest.mark.fuzz
@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_many_mutated_outputs_in_any_pieces_give_the_same_events(row: ToolFormat) -> None:
    def run(seed: int) -> None:
        assert not faults(row, seed)

    fuzz(run, 100_000)
