"""Formats of a served model: recognized or named, and what they say of an output."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop
from llguidance import LLMatcher
from tokenizers import AddedToken

from quire.core.errors import ConfigError
from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.grammars.constrained import TokenizerText, read_vocabulary
from quire.engine.requests.reasoning_gate import ReasoningMarkers
from quire.server.options import ServerOptions
from quire.server.templates.template_renderer import TemplateRenderer
from quire.server.tools.call_reader import Content, Reasoning
from quire.server.tools.served_formats import NO_TOOLS, OutputReading, ServedFormats, ToolUse
from quire.text.tokenizer import Tokenizer
from support import small_tokenizers
from support.calling_model import CLOCK, KNOWING_TEMPLATE, SPECIAL, WEATHER
from support.grammar_walks import GrammarWalk

PROMPT = "user: hi\nassistant:"
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
AUTO, REQUIRED = ToolUse([WEATHER], [WEATHER]), ToolUse([WEATHER], [WEATHER], is_required=True)
UNKNOWN = "{% if tools %}{{ messages[0].tool_calls }}{% endif %}"
CONSTRAINED = [
    ToolUse([STRICT], [STRICT]), ToolUse([WEATHER, CLOCK], [CLOCK]), ToolUse([WEATHER], [WEATHER], is_parallel=False),
]  # fmt: skip


def formats(
    folder: Path, template: object = KNOWING_TEMPLATE, added: Sequence[AddedToken] = (), **options: str
) -> ServedFormats:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens(list(added))
    small_tokenizers.save(tokenizer, folder, chat_template=template)
    return ServedFormats(Tokenizer.from_folder(folder), ServerOptions(**options))


def reading_of(served: ServedFormats, use: ToolUse, prompt: str = PROMPT) -> OutputReading | None:
    return served.reading(prompt, use, shows_reasoning=True)


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_unknown_names_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option.replace('_', '-')} 'hermit' is unknown; choose auto, none"):
        formats(tmp_path, **{option: "hermit"})


MARKERS = '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>\\n"}'


@pytest.mark.parametrize("config", ["", "{}", '{"reasoning_end_str": "</think>"}', MARKERS])
def test_markers_of_reasoning_may_be_named(tmp_path: Path, config: str) -> None:
    served = formats(tmp_path, reasoning_parser="qwen3", reasoning_config=config)
    assert served.reasoning is not None
    assert served.reasoning.markers[0][1].strip() == "</think>"


@pytest.mark.parametrize(
    ("parser", "config", "message"),
    [
        ("qwen3", '{"reasoning_end_str": "Done.</think>"}',
         "reasoning_end_str must be '</think>', the marker of the format qwen3 (reasoning_parser), got 'Done.</t"),
        ("qwen3", '{"reasoning_start_str": 1}', "reasoning_start_str must be '<think>'"),
        ("qwen3", '{"start": "<think>"}', "'start' is unknown; the keys are reasoning_start_str, reasoning_end_str"),
        ("qwen3", '["<think>"]', "must be a JSON object, got"),
        ("qwen3", "<think>", "must be a JSON object, got '<think>': "),
        ("none", MARKERS, "the outputs of this model have no reasoning (see reasoning_parser)"),
    ],
)  # fmt: skip
def test_other_markers_of_reasoning_are_refused(tmp_path: Path, parser: str, config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^reasoning_config.*" + re.escape(message)):
        formats(tmp_path, reasoning_parser=parser, reasoning_config=config)


def test_markers_remain_in_the_text(tmp_path: Path) -> None:
    served = formats(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert {tokenizer.token_text(token_id) for token_id in served.kept_token_ids} == {*SPECIAL[:2]}


@pytest.mark.parametrize(
    ("parser", "pattern"),
    [("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[a-zA-Z0-9]{9}"), ("kimi_k2", r"functions\.f:2")],
)
def test_ids_are_those_that_templates_expect(tmp_path: Path, parser: str, pattern: str) -> None:
    reading = reading_of(formats(tmp_path, tool_call_parser=parser), AUTO)
    assert reading is not None
    assert re.fullmatch(pattern, reading.call_id("f", 2))


def test_calls_of_no_known_format_are_content_unless_they_are_forced(tmp_path: Path) -> None:
    served = formats(tmp_path, UNKNOWN)
    assert reading_of(served, AUTO) is None
    assert reading_of(served, REQUIRED) is not None
    assert "<tool_call>" in str(served.grammar(PROMPT, REQUIRED, None, is_for_check=True))


@pytest.mark.parametrize(
    ("template", "parser", "is_read"),
    [(small_tokenizers.CHAT_TEMPLATE, "auto", True), (small_tokenizers.CHAT_TEMPLATE, "none", False),
     ("{{ tools | tojson if tools }}" + small_tokenizers.CHAT_TEMPLATE, "auto", False)],
    ids=["told", "not to be read", "shown by the template"],
)  # fmt: skip
def test_calls_are_read_in_the_format_that_the_prompt_tells(
    tmp_path: Path, template: str, parser: str, is_read: bool
) -> None:
    small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, chat_template=template)
    tokenizer = Tokenizer.from_folder(tmp_path)

    async def check() -> None:
        templates = TemplateRenderer(tokenizer)
        served = ServedFormats(tokenizer, ServerOptions(tool_call_parser=parser), templates)
        try:
            await templates.render([{"role": "user", "content": "hi"}], tools=[WEATHER])
        finally:
            await templates.close()
        assert (reading_of(served, AUTO) is not None) == is_read
        assert reading_of(served, NO_TOOLS) is None

    uvloop.run(check())


def test_format_is_recognized_by_the_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": KNOWING_TEMPLATE}]
    assert formats(tmp_path, named).call_format == "hermes"


def test_output_is_free_unless_something_constrains_it(tmp_path: Path) -> None:
    served = formats(tmp_path)
    assert served.grammar(PROMPT, AUTO, None) is None
    assert served.grammar(PROMPT, NO_TOOLS, None) is None
    for use in (*CONSTRAINED, REQUIRED):
        assert served.grammar(PROMPT, use, None) is not None


def test_answer_is_the_grammar_of_an_output_without_calls(tmp_path: Path) -> None:
    answer = StructuredOutputsParams(grammar="start: /[ab]/\n")
    served = formats(tmp_path, reasoning_parser="none")
    assert served.grammar(PROMPT, NO_TOOLS, answer) == answer.grammar
    assert "get_weather" in str(served.grammar(PROMPT, AUTO, answer))
    assert "[ab]" in str(served.grammar(PROMPT, AUTO, answer))
    assert "[ab]" not in str(served.grammar(PROMPT, REQUIRED, answer))


@pytest.mark.parametrize(
    ("parser", "prompt", "expected"),
    [
        ("qwen3", "a", ReasoningMarkers(("<think>",), ("</think>",))),
        ("qwen3", "a<think>\n", ReasoningMarkers(("<think>",), ("</think>",), is_open=True)),
        ("gpt_oss", "a", ReasoningMarkers(("<|channel|>analysis<|message|>",), ("<|end|>",), recurs=True)),
    ],
)
def test_reading_knows_where_stop_strings_are_not_looked_for(
    tmp_path: Path, parser: str, prompt: str, expected: ReasoningMarkers
) -> None:
    reading = reading_of(formats(tmp_path, reasoning_parser=parser), ToolUse(), prompt)
    assert reading is not None
    assert reading.reasoning == expected


def test_grammar_follows_the_reasoning(tmp_path: Path) -> None:
    served, answer = formats(tmp_path), StructuredOutputsParams(grammar="start: /[ab]/\n")
    optional, begun = served.grammar(PROMPT, NO_TOOLS, answer), served.grammar(f"{PROMPT}<think>\n", NO_TOOLS, answer)
    assert optional is not None
    assert begun is not None
    assert "<think>" in optional
    assert "<think>" not in begun
    assert "</think>" in begun
    assert served.grammar(f"{PROMPT}<think>\n\n</think>\n\n", NO_TOOLS, answer) == answer.grammar


def test_answer_of_a_format_with_channels_is_its_final_message(tmp_path: Path) -> None:
    served = formats(tmp_path, tool_call_parser="gpt_oss", reasoning_parser="gpt_oss")
    answer, walks = StructuredOutputsParams(grammar="start: /[ab]{1,4}/\n"), GrammarWalk()
    thinking = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}'
    for use, calls in ((NO_TOOLS, False), (AUTO, True)):
        grammar = served.grammar(PROMPT, use, answer, is_for_check=True)
        assert grammar is not None
        for before in ("", thinking):
            assert walks.accepts(grammar, f"{before}<|channel|>final<|message|>ab")
            assert not walks.accepts(grammar, f"{before}<|channel|>final<|message|>c")
            assert walks.accepts(grammar, before + call) is calls
        assert not walks.accepts(grammar, "ab")
    reading = reading_of(served, NO_TOOLS)
    assert reading is not None
    parser = reading.new_parser()
    events = parser.feed(f"{thinking}<|channel|>final<|message|>ab") + parser.finish()
    assert events == [Reasoning("Hm."), Content("ab")]


def matched(folder: Path, grammar: str | None, text: str) -> int:
    """Return how many tokens of a text the grammar allows, as the engine compiles it."""
    tokenizer = Tokenizer.from_folder(folder)
    spelled = TokenizerText(str(tokenizer.exact_json()), tokenizer.vocab_size, tokenizer.eos_token_id)
    matcher = LLMatcher(read_vocabulary(spelled, tokenizer.vocab_size, frozenset()), str(grammar))
    return matcher.try_consume_tokens(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "as Qwen3's"])
def test_grammars_allow_markers_as_the_tokens_that_the_model_writes(tmp_path: Path, is_special: bool) -> None:
    markers = ("<think>", "</think>", "<tool_response>")
    served = formats(tmp_path, added=[AddedToken(text, special=is_special, normalized=False) for text in markers])
    tokenizer = Tokenizer.from_folder(tmp_path)
    for prompt, text in ((PROMPT, "<think>hm</think>\n\na"), (f"{PROMPT}<think>\n", "hm</think>\n\nb")):
        grammar = served.grammar(prompt, NO_TOOLS, StructuredOutputsParams(grammar="start: /[ab]/\n"))
        assert matched(tmp_path, grammar, text) == len(tokenizer.encode(text, add_special_tokens=False))
    assert all(tokenizer.token_text(token_id) in SPECIAL for token_id in served.kept_token_ids) is not is_special
