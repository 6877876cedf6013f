"""From prompts to requests that the engine takes, off the event loop. Nothing is queued before all are ready."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quire.core.beam_search_params import BeamSearchParams
from quire.core.checks import refuse
from quire.core.sampling_params import SamplingParams
from quire.engine.client import PreparedRequest
from quire.engine.input_processor import TokenizedPrompt
from quire.server.errors import invalid
from quire.server.limits import Limits
from quire.server.openai.bodies import ChatBody, ChatMessage, TemplateOptions
from quire.server.service import Service
from quire.text.chat_template import Message

Prompt = str | list[int]
_TEMPLATE_ARGUMENTS = frozenset(("messages", "add_generation_prompt", "continue_final_message"))


def as_prompts(prompt: Any) -> list[Prompt]:  # noqa: ANN401 (JSON)
    """Tell one prompt from a list of them. InvalidRequestError for anything that is neither text nor a list."""
    if isinstance(prompt, str):
        return [prompt]
    is_list = isinstance(prompt, list) and bool(prompt)
    is_token_ids = is_list and type(prompt[0]) is int
    if not is_list or not (is_token_ids or all(isinstance(one, str | list) for one in prompt)):
        refuse("prompt", prompt, "text, a list of token ids, or a list of such prompts that is not empty")
    return [prompt] if is_token_ids else prompt


def check_num_choices(num_prompts: int, n: int, limits: Limits) -> None:
    """Raise ApiError 400 for more choices than one call may have."""
    most = limits.max_choices
    if num_prompts * n > most:
        message = f"{num_prompts} prompts with n {n}: a call may have at most {most} choices (max_choices)"
        invalid(message, param="prompt" if num_prompts > most else "n")


class Asked(NamedTuple):
    """What the prompts of a call have in common. `key_number`: of the API key that it came with, from 1; 0: none."""

    params: SamplingParams
    beam: BeamSearchParams | None
    cache_salt: str | None
    priority: int
    key_number: int


async def prepare_prompts(service: Service, prompts: list[Prompt], asked: Asked) -> list[PreparedRequest]:
    """Return a request for each prompt. InvalidRequestError for the first that cannot be served."""
    return await _in_thread(service, service.client.inputs.tokenize, prompts, asked)


async def prepare_chat(service: Service, body: ChatBody, asked: Asked) -> list[PreparedRequest]:
    """Return the request for a conversation, as a list of one."""
    text = await render(service, body.messages, body)
    return await _in_thread(service, service.client.inputs.tokenize_rendered, [text], asked)


async def render(service: Service, messages: list[ChatMessage], options: TemplateOptions) -> str:
    """Return a conversation as the chat template writes it. InvalidRequestError if it cannot."""
    continues = bool(options.continue_final_message)
    begins = options.add_generation_prompt
    variables = options.chat_template_kwargs or {}
    for name in _TEMPLATE_ARGUMENTS.intersection(variables):
        refuse("chat_template_kwargs", name, "variables that are no fields of the body")
    return await service.templates.render(
        [_as_message(message) for message in messages],
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        variables=variables,
    )


def _as_message(message: ChatMessage) -> Message:
    """Return a message as it came: a template may ask whether a key is there."""
    named = {name: getattr(message, name) for name in ("role", "content") if name in message.model_fields_set}
    return named | (message.model_extra or {})


async def _in_thread(
    service: Service, tokenize: Callable[[Any], TokenizedPrompt], prompts: Sequence[Any], asked: Asked
) -> list[PreparedRequest]:
    """Tokenize all prompts, check what they come to, and only then number them.

    A prompt that does not fit is told before what all come to: clients look for that, and shorten it.
    """
    limits, params = service.client.inputs.limits, asked.params

    def prepare() -> list[PreparedRequest]:
        tokenized: list[TokenizedPrompt] = []
        num_tokens = 0
        for prompt in prompts:
            tokenized.append(tokenize(prompt).salted(asked.cache_salt, asked.key_number))
            limits.check_admissible(len(tokenized[-1].token_ids), params.max_tokens or 1, params.n)
            num_tokens += len(tokenized[-1].token_ids)
            _check_total(num_tokens, params, service.options)
        return [service.client.prepare(prompt, params, asked.beam, asked.priority) for prompt in tokenized]

    threads = service.threads_for(sum(map(len, prompts)))
    return await asyncio.get_running_loop().run_in_executor(threads, prepare)


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
