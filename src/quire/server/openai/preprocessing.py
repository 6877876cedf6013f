"""Preprocessing: prompts and conversations to engine requests, tokenized off the event loop.

Nothing is queued before all prompts of a call are prepared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.core.checks import refuse
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.input_processor import CheckedParams, PreparedRequest, TokenizedPrompt
from quire.server.api.output_constraints import CONSTRAINT_FIELDS
from quire.server.errors import invalid, unsupported
from quire.server.openai.request_models import EFFORTS, ChatBody, ChatMessage, TemplateOptions
from quire.server.openai.response_builder import OpenAIRequest
from quire.server.options import Limits
from quire.server.service import Service
from quire.text.conversation import Message
from quire.text.tools import Tool, check_tools

Prompt = str | list[int]
_TEMPLATE_ARGUMENTS = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))


def parse_prompts(prompt: Any) -> list[Prompt]:  # noqa: ANN401 (JSON)
    """Return the prompts of a body as a list. InvalidRequestError for anything that is neither text nor a list."""
    if isinstance(prompt, str):
        return [prompt]
    is_list = isinstance(prompt, list) and bool(prompt)
    is_token_ids = is_list and type(prompt[0]) is int
    if not is_list or not (is_token_ids or any(_all_are(kind, prompt) for kind in (str, list))):
        expected = "text, a list of token ids, or a list that is not empty, of texts or of lists of token ids"
        refuse("prompt", prompt, expected)
    return [prompt] if is_token_ids else prompt


def _all_are(kind: type, prompts: list[Any]) -> bool:
    return all(isinstance(prompt, kind) for prompt in prompts)


def check_num_choices(num_prompts: int, n: int, limits: Limits) -> None:
    """Raise ApiError 400 for more choices than one call may have."""
    most = limits.max_choices
    if num_prompts * n > most:
        message = f"{num_prompts} prompts with n {n}: a call may have at most {most} choices (max_choices)"
        invalid(message, param="prompt" if num_prompts > most else "n")


async def constrained(service: Service, call: OpenAIRequest) -> OpenAIRequest:
    """Return the call with the grammar that its body asks for, if any. Raises as `OutputConstraints.check`."""
    fields = {name: value for name in CONSTRAINT_FIELDS if (value := getattr(call.body, name)) is not None}
    if not fields or fields == {"response_format": {"type": "text"}}:
        return call
    name, value = next(iter(fields.items()))
    if service.constraints is None:
        unsupported(name, value)
    params = await service.constraints.check(fields, call.client_id)
    if params is None:
        return call
    if call.checked.beam is not None:
        invalid(f"{name} is not allowed when use_beam_search is true", param=name)
    checked = call.checked
    whole = replace(checked.params, structured_outputs=params)
    return replace(call, checked=service.client.inputs.check_params(whole, checked.beam, checked.priority))


async def prepare_prompts(service: Service, call: OpenAIRequest, prompts: list[Prompt]) -> OpenAIRequest:
    """Return the call with an engine request for each prompt. InvalidRequestError for the first invalid one."""
    adds_special_tokens = call.body.add_special_tokens is not False
    tokenize = partial(service.client.inputs.tokenize, add_special_tokens=adds_special_tokens)
    return await _prepared(service, call, tokenize, prompts)


async def prepare_chat(service: Service, call: OpenAIRequest, body: ChatBody) -> OpenAIRequest:
    """Return the call with the engine request for its conversation, and the reading of its outputs."""
    text = await rendered(service, body.messages, body, call.client_id, _forced_tools(call))
    call = await _with_formats(service, call, body, text)
    tokenize = partial(service.client.inputs.tokenize_rendered, add_special_tokens=bool(body.add_special_tokens))
    return await _prepared(service, call, tokenize, [text])


async def rendered(
    service: Service, messages: list[ChatMessage], options: TemplateOptions, client_id: str,
    forced: Sequence[Tool] = (),
) -> str:  # fmt: skip
    """Return the text of a conversation, by the chat template. InvalidRequestError if it cannot be rendered.

    The schemas of the tools that are `forced` are checked, too.
    """
    continues = bool(options.continue_final_message)
    begins = options.add_generation_prompt
    variables = _effort_variables(options.reasoning_effort) | (options.chat_template_kwargs or {})
    for name in _TEMPLATE_ARGUMENTS.intersection(variables):
        refuse("chat_template_kwargs", name, "variables that are no fields of the body")
    return await service.templates.render(
        [_as_message(message) for message in messages],
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        variables=variables,
        tools=check_tools(options.tools) if options.tools else None,
        forced=forced,
        limits=service.options,
        client_id=client_id,
    )


def _effort_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables of templates that depend on reasoning_effort; templates ignore those that they do not know.

    `enable_thinking` is that of Qwen3 and GLM, `thinking` of DeepSeek V3.1 and Granite, `reasoning_effort` of gpt-oss.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        refuse("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort, "enable_thinking": True, "thinking": True}


def _forced_tools(call: OpenAIRequest) -> Sequence[Tool]:
    """Return the tools with schemas that become part of the grammar of the output."""
    use = call.tools
    if use.is_required or call.params.structured_outputs is not None:
        return use.allowed
    return [tool for tool in use.allowed if tool["function"].get("strict")]


async def _with_formats(service: Service, call: OpenAIRequest, body: ChatBody, prompt: str) -> OpenAIRequest:
    """Return the call with the reading of outputs that continue a rendered prompt, and with their grammar."""
    formats, use = service.formats, call.tools
    if formats is None:
        return call
    reading = formats.reading(prompt, use, shows_reasoning=body.include_reasoning is not False)
    answer = call.params.structured_outputs
    applies_at_once = service.constraints is not None and service.constraints.applies_in_reasoning
    if not use.is_constrained and (answer is None or applies_at_once):
        return replace(call, reading=reading)

    def checked() -> CheckedParams:
        text = formats.grammar(prompt, use, None if answer is None else answer.to_grammar())
        if text is None:
            return call.checked
        params = replace(call.params, structured_outputs=StructuredOutputsParams(grammar=text))
        return service.client.inputs.check_params(params, call.checked.beam, call.checked.priority)

    return replace(call, reading=reading, checked=await service.threads.run(len(prompt), checked, call.client_id))


def _as_message(message: ChatMessage) -> Message:
    """Return a message with the keys that were sent: a template may test whether a key is present."""
    named = {name: getattr(message, name) for name in ("role", "content") if name in message.model_fields_set}
    return named | (message.model_extra or {})


async def _prepared(
    service: Service, call: OpenAIRequest, tokenize: Callable[[Any], TokenizedPrompt], prompts: Sequence[Any]
) -> OpenAIRequest:
    """Tokenize all prompts, check their sum, and only then create the engine requests.

    A prompt that is too long for the model is reported before the sum: clients look for that error and shorten it.
    """
    limits, params = service.client.inputs.limits, call.params

    def prepare() -> list[PreparedRequest]:
        tokenized: list[TokenizedPrompt] = []
        num_tokens = 0
        for prompt in prompts:
            tokenized.append(tokenize(prompt).salted(call.cache_salt, call.key_number))
            limits.check_admissible(len(tokenized[-1].token_ids), params.max_tokens or 1, params.n)
            num_tokens += len(tokenized[-1].token_ids)
            _check_total(num_tokens, params, service.options)
        weight = service.options.weight_of(call.key_number)
        kept = service.formats.kept_token_ids if service.formats and call.reading else frozenset[int]()
        return [
            service.client.prepare(prompt, call.checked, call.client_id, weight)._replace(kept_token_ids=kept)
            for prompt in tokenized
        ]

    return replace(call, requests=await service.threads.run(sum(map(len, prompts)), prepare, call.client_id))


def _check_total(num_tokens: int, params: SamplingParams, limits: Limits) -> None:
    if num_tokens > limits.max_call_tokens:
        most = limits.max_call_tokens
        invalid(f"the prompts of one call may have at most {most} tokens together (max_call_tokens)", param="prompt")
    if params.prompt_logprobs is None:
        return
    num_logprobs = num_tokens * (params.prompt_logprobs + 1) * params.n
    if num_logprobs > limits.max_prompt_candidates:
        invalid(
            f"{num_tokens} prompt tokens with prompt_logprobs {params.prompt_logprobs} and n {params.n} come to "
            f"{num_logprobs} logprobs: one call may have at most {limits.max_prompt_candidates} "
            f"(max_prompt_candidates)",
            param="prompt_logprobs",
        )
