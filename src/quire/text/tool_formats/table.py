"""Tables of the formats of tool calls and of reasoning. Parser, grammars and documentation are made from the rows."""

from collections.abc import Sequence
from typing import TypeVar

from quire.text.tool_formats.tool_format import ReasoningFormat, ToolFormat

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "qwen3_coder",
        "Qwen3-Coder, Qwen3.5 and later, MiMo, Nemotron 3, Step 3.5 and 5",
        call="\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
        notation="tagged",
        variants=("\n<function={name}>\n{parameters}</function>",),
        aliases=("qwen3_xml", "mimo", "step3p5", "step5"),
        fingerprints=(("<function=", "<parameter=", "<tool_call>"),),
    ),
    ToolFormat(
        "seed_oss",
        "Seed-OSS",
        call="\n<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
        parameter="<parameter={key}>{value}</parameter>\n",
        notation="tagged",
        fingerprints=(("<seed:tool_call>",),),
    ),
    ToolFormat(
        "dots",
        "dots",
        call='<invoke name="{name}">{parameters}</invoke>',
        parameter='<parameter name="{key}">{value}</parameter>',
        section=("<dots_function_call>", "</dots_function_call>"),
        separator="",
        notation="tagged",
        fingerprints=(("<dots_function_call>",),),
    ),
    ToolFormat(
        "step3",
        "Step 3",
        call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{parameters}'
        "</steptml:invoke><｜tool_call_end｜>",
        parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        separator="<｜tool_sep｜>",
        notation="tagged",
        variants=(
            '<｜tool_call_begin｜><steptml:invoke name="{name}">{parameters}</steptml:invoke><｜tool_call_end｜>',
        ),
        fingerprints=(("<steptml:invoke",),),
    ),
    ToolFormat(
        "longcat",
        "LongCat Flash",
        call="<longcat_tool_call>{call}</longcat_tool_call>",
        skips_space=True,
        fingerprints=(("<longcat_tool_call>",),),
    ),
    ToolFormat(
        "plamo3",
        "PLaMo 3",
        call="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{arguments}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        section=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
        separator="",
        fingerprints=(("<|plamo:begin_tool_request",),),
    ),
    ToolFormat(
        "apertus",
        "Apertus",
        call="<|tools_prefix|>{calls}<|tools_suffix|>",
        separator=", ",
        has_name_as_key=True,
        fingerprints=(("<|tools_prefix|>",),),
    ),
    *(
        ToolFormat(
            name,
            models,
            call="<|START_ACTION|>{calls}<|END_ACTION|>",
            separator=",\n    ",
            keys=("tool_name", "parameters"),
            index_key="tool_call_id",
            drops=(f"<|START_{part}|>", f"<|END_{part}|>"),
            fingerprints=(("<|START_ACTION|>", *others),),
        )
        for name, models, part, others in (
            ("cohere_command4", "Command A+", "TEXT", ["<|START_TEXT|>"]),
            ("cohere_command3", "Command A, R7B", "RESPONSE", []),
        )
    ),
    ToolFormat(
        "gigachat3",
        "GigaChat 3 and 3.1",
        call="<|function_call|>{call}",
        separator="",
        variants=("<|message_sep|>\n\nfunction call<|role_sep|>\n{call}",),
        fingerprints=(("<|function_call|>",), ("function call", "<|role_sep|>", "<|message_sep|>")),
    ),
    ToolFormat(
        "functiongemma",
        "FunctionGemma",
        call="<start_function_call>call:{name}{arguments}<end_function_call>",
        separator="",
        notation="gemma",
        quote="<escape>",
        fingerprints=(("<start_function_call>",),),
    ),
    ToolFormat(
        "minimax_m2",
        "MiniMax M2",
        call='<invoke name="{name}">\n{parameters}</invoke>\n',
        parameter='<parameter name="{key}">{value}</parameter>\n',
        section=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
        separator="",
        notation="tagged",
        fingerprints=(("<minimax:tool_call>", "<invoke name="),),
    ),
    ToolFormat(
        "hy_v3",
        "Hunyuan 3",
        call="<tool_call>{name}<tool_sep>\n{parameters}</tool_call>\n",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        section=("<tool_calls>\n", "</tool_calls>"),
        separator="",
        notation="tagged",
        fingerprints=(("<tool_sep>", "<arg_key>"),),
    ),
    ToolFormat(
        "hy_v4",
        "Hunyuan 4",
        call="<tool_call>{name}{parameters}</tool_call>",
        parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        section=("<tool_calls>", "</tool_calls>"),
        separator="",
        notation="tagged",
        fingerprints=(("<tool_calls>", "</arg_key><arg_value>"),),
    ),
    ToolFormat(
        "glm47",
        "GLM 4.7 and 5, Ling 3",
        call="<tool_call>{name}{parameters}</tool_call>",
        parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        separator="",
        notation="tagged",
        skips_space=True,
        aliases=("ling3",),
        fingerprints=(("</arg_key><arg_value>",),),
    ),
    ToolFormat(
        "glm45",
        "GLM 4.5 and 4.6, Laguna",
        call="\n<tool_call>{name}\n{parameters}</tool_call>",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        separator="",
        notation="tagged",
        aliases=("poolside_v1",),
        fingerprints=(("<arg_key>", "<arg_value>"),),
    ),
    ToolFormat(
        "hermes",
        "Qwen 2.5 and 3, Hermes 2 and 3, Granite 4, and others with JSON in `<tool_call>`",
        call="\n<tool_call>\n{call}\n</tool_call>",
        separator="",
        aliases=("granite4", "ernie45", "qwen3_json"),
        fingerprints=(("<tool_call>", "</tool_call>"),),
    ),
    ToolFormat(
        "hunyuan_a13b",
        "Hunyuan A13B, Jamba",
        call="\n<tool_calls>{calls}</tool_calls>",
        separator=", ",
        aliases=("jamba",),
        fingerprints=(("<tool_calls>", "</tool_calls>"),),
    ),
    *(
        ToolFormat(
            name,
            models,
            call=f'<｜DSML｜{space}invoke name="{{name}}">\n{{parameters}}</｜DSML｜{space}invoke>\n',
            parameter=f'<｜DSML｜{space}parameter name="{{key}}" string="{{type}}">'
            f"{{value}}</｜DSML｜{space}parameter>\n",
            section=(f"\n\n<｜DSML｜{space}{section}>\n", f"</｜DSML｜{space}{section}>"),
            separator="",
            notation="tagged",
            variants=(f'<｜DSML｜{space}invoke name="{{name}}"/>',),
            fingerprints=((f"｜DSML｜{space}{section}",),),
        )
        for name, models, section, space in (
            ("deepseek_v32", "DeepSeek V3.2", "function_calls", ""),
            ("deepseek_v41", "DeepSeek V4.1", "calls", " "),
            ("deepseek_v4", "DeepSeek V4", "tool_calls", ""),
        )
    ),
    ToolFormat(
        "deepseek_v3",
        "DeepSeek V3 and R1",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        fingerprints=(("<｜tool▁call▁begin｜>", "```json"),),
    ),
    ToolFormat(
        "deepseek_v31",
        "DeepSeek V3.1",
        call="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="",
        fingerprints=(("<｜tool▁call▁begin｜>",),),
    ),
    ToolFormat(
        "kimi_k2",
        "Kimi K2",
        call="<|tool_call_begin|>{?functions.}{name}{:index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        separator="",
        fingerprints=(("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
    ),
    ToolFormat(
        "kimi_k3",
        "Kimi K3",
        call='<|open|>call tool="{name}" index="{index}"<|sep|>{parameters}<|close|>call<|sep|>',
        parameter='<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        separator="",
        notation="tagged",
        drops=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        is_escaped=True,
        fingerprints=(("<|open|>", "<|sep|>", "<|close|>"),),
    ),
    ToolFormat(
        "mistral",
        "Mistral since version 11 of its tokenizer (Small 3.2, Magistral, Ministral 3, Devstral)",
        call="[TOOL_CALLS]{name}[ARGS]{arguments}",
        separator="",
        variants=("[TOOL_CALLS]{name}[CALL_ID]{index}[ARGS]{arguments}", "[TOOL_CALLS] {calls}"),
        fingerprints=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    ToolFormat(
        "mistral_v3",
        "Mistral up to version 7 of its tokenizer (7B v0.3, Nemo, Large 2)",
        call="[TOOL_CALLS] {calls}",
        separator=", ",
        variants=("[TOOL_CALLS]{name}[ARGS]{arguments}",),
        fingerprints=(("[TOOL_CALLS]",), ("[AVAILABLE_TOOLS]",)),
    ),
    ToolFormat(
        "gpt_oss",
        "gpt-oss (Harmony)",
        call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        separator="<|call|><|start|>assistant",
        has_channels=True,
        aliases=("openai",),
        fingerprints=(("<|channel|>", "<|message|>", "<|start|>"),),
    ),
    ToolFormat(
        "gemma4",
        "Gemma 4",
        call="<|tool_call>call:{name}{arguments}<tool_call|>",
        separator="",
        notation="gemma",
        variants=("<|tool_call>:{name}{arguments}<tool_call|>",),
        fingerprints=(("<|tool_call>call:",), ("<|tool_call>", "<tool_call|>")),
    ),
    ToolFormat(
        "granite",
        "Granite 3",
        call="<|tool_call|>{calls}",
        separator=", ",
        variants=("<tool_call>{calls}",),
        drops=("<|/tool_call|>",),
        fingerprints=(("<|tool_call|>",),),
    ),
    ToolFormat(
        "nemotron_json",
        "Nemotron Nano 2, Llama Nemotron",
        call="<TOOLCALL>{calls}</TOOLCALL>",
        separator=", ",
        skips_space=True,
        fingerprints=(("<TOOLCALL>",),),
    ),
    ToolFormat(
        "granite-20b-fc",
        "Granite 20B function calling",
        call="<function_call> {call}",
        separator="",
        fingerprints=(("<function_call>",),),
    ),
    ToolFormat(
        "internlm",
        "InternLM 2.5",
        call="<|action_start|><|plugin|>\n{call}<|action_end|>",
        separator="",
        fingerprints=(("<|action_start|><|plugin|>",),),
    ),
    ToolFormat(
        "phi4_mini_json",
        "Phi 4 mini",
        call="functools{calls}",
        separator=", ",
        fingerprints=(("functools[",),),
    ),
    ToolFormat(
        "lfm2",
        "LFM 2",
        call="<|tool_call_start|>{list}<|tool_call_end|>",
        separator=", ",
        notation="python",
        fingerprints=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    ToolFormat(
        "pythonic",
        "Llama 4, Llama 3.2 with lists of calls, ToolACE, OLMo 3",
        call="{list}",
        separator=", ",
        notation="python",
        variants=("<|python_start|>{list}<|python_end|>",),
        aliases=("llama4_pythonic",),
        fingerprints=(("[func_name1(", ")]"),),
    ),
    ToolFormat(
        "xlam",
        "xLAM 2",
        call="{calls}",
        separator=", ",
        variants=("```json\n{calls}\n```", "<tool_call>{calls}</tool_call>", "[TOOL_CALLS]{calls}"),
    ),
    ToolFormat(
        "llama3_json",
        "Llama 3.1 to 3.3",
        call="{call}",
        separator="; ",
        keys=("name", "parameters"),
        variants=("<|python_tag|>{call}", "<|python_start|>{call}<|python_end|>"),
        aliases=("llama4_json",),
        fingerprints=(('{"name": function name, "parameters":',), ('"parameters": ', "ipython")),
    ),
)

_THINK = (("<think>", "</think>"),)
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        "gpt_oss",
        "gpt-oss (Harmony)",
        markers=(("<|channel|>analysis<|message|>", "<|end|>"),),
        has_channels=True,
        aliases=("openai_gptoss",),
        fingerprints=(("<|channel|>", "<|message|>", "<|start|>"),),
    ),
    ReasoningFormat(
        "gemma4",
        "Gemma 4",
        markers=(("<|channel>thought", "<channel|>"),),
        fingerprints=(("<|channel>", "<channel|>"),),
    ),
    ReasoningFormat(
        "kimi_k3",
        "Kimi K3",
        markers=(("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
        ends=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
        fingerprints=(("<|open|>", "<|sep|>", "<|close|>"),),
    ),
    ReasoningFormat(
        "mistral",
        "Magistral and other reasoning models of Mistral",
        markers=(("[THINK]", "[/THINK]"), ("<think>", "</think>")),
        may_call=False,
        fingerprints=(("[THINK]",), ("<think>", "[TOOL_CALLS]")),
    ),
    *(
        ReasoningFormat(name, models, markers=(pair,), fingerprints=((pair[0],),), aliases=aliases)
        for name, models, pair, aliases in (
            ("minimax_m3", "MiniMax M3", ("<mm:think>", "</mm:think>"), ()),
            ("plamo3", "PLaMo 3", ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"), ()),
            ("cohere_command3", "Command A, A+", ("<|START_THINKING|>", "<|END_THINKING|>"), ("cohere_command4",)),
        )
    ),
    ReasoningFormat(
        "hunyuan_a13b",
        "Hunyuan A13B",
        markers=_THINK,
        drops=("<answer>", "\n</answer>"),
        fingerprints=(("<think>", "<answer>"),),
    ),
    ReasoningFormat(
        "granite",
        "Granite 3.2",
        markers=(
            ("Here is my thought process:", "Here is my response:"),
            ("Here's my thought process:", "Here's my response:"),
        ),
        fingerprints=(("Here is my thought process:",), ("Here's my thought process:",)),
    ),
    ReasoningFormat(
        "seed_oss",
        "Seed-OSS",
        markers=(("<seed:think>", "</seed:think>"),),
        fingerprints=(("<seed:think>",),),
    ),
    ReasoningFormat(
        "deepseek_r1",
        "models that always reason, with the start marker in the prompt or left out (DeepSeek R1, QwQ, MiniMax M2)",
        markers=_THINK,
        is_open_from_start=True,  # so only by name: with a start marker in the prompt or the output, `qwen3` serves
        aliases=("minimax_m2", "step3", "step3p5", "step5"),
    ),
    ReasoningFormat(
        "qwen3",
        "models with `<think>` in the prompt or in the output (Qwen 3, GLM, Kimi K2, DeepSeek, MiniMax and others)",
        markers=_THINK,
        aliases=(
            "glm45", "glm47", "kimi_k2", "deepseek_v3", "deepseek_v4", "deepseek_v41", "mimo", "nemotron_v3", "holo2",
            "ernie45", "olmo3", "hy_v3", "hy_v4", "ling3", "poolside_v1", "minicpmv",
            "granite_thinking_parser",
        ),
        fingerprints=(("<think>",), ("</think>",)),
    ),
)  # fmt: skip

# Names of vLLM's parsers that are refused, and the reason.
UNSUPPORTED = {
    "beam": "it is for one model of its own",
    "hf": "auto recognizes the format of the chat template",
    "inkling": "messages by content type are not read",
    "k2_horizon": "it has three formats, chosen by a variable of the template",
    "minicpm5": "CDATA sections of XML are not read",
    "minimax_m3": "arguments as nested XML elements are not read",
    "minimax_m2_append_think": "it leaves reasoning in the content; none does so, too",
    **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), "channels of Muse are not read"),
    "olmo3": "calls on lines of their own are not read; pythonic reads lists of calls",
}

# Format of calls that are required where a template has no known format.
FALLBACK = next(row for row in TOOL_FORMATS if row.name == "hermes")

Row = TypeVar("Row", bound=ToolFormat | ReasoningFormat)


def find_format(name: str, chat_template: str | None = None) -> ToolFormat | None:
    """Return the format of this name, or for "auto" the first one with a fingerprint of the template.

    Return None for "none", and for "auto" if none fits. Raise ValueError, with the names that exist, for other names.
    """
    return _find(TOOL_FORMATS, "tool-call-parser", name, chat_template)


def find_reasoning(name: str, chat_template: str | None = None) -> ReasoningFormat | None:
    """Return the reasoning format of this name, or for "auto" the one that fits, as `find_format` does."""
    return _find(REASONING_FORMATS, "reasoning-parser", name, chat_template)


def _find(rows: Sequence[Row], option: str, name: str, chat_template: str | None) -> Row | None:
    if name == "none":
        return None
    if name != "auto":
        for row in rows:
            if name in (row.name, *row.aliases):
                return row
        if name in UNSUPPORTED:
            raise ValueError(f"{option} {name!r} is not supported: {UNSUPPORTED[name]}")
        names = ", ".join(sorted({known for row in rows for known in (row.name, *row.aliases)}))
        raise ValueError(f"{option} {name!r} is unknown; choose auto, none, {names}")
    for row in rows:
        if chat_template and any(all(text in chat_template for text in texts) for texts in row.fingerprints):
            return row
    return None
