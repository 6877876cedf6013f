"""From prompts to requests that the engine takes, and text to token ids and back, off the event loop.

Nothing is queued before all prompts of a call are ready.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.core.checks import check_token_ids, refuse
from quire.core.sampling_params import SamplingParams
from quire.engine.input_processor import PreparedRequest, TokenizedPrompt
from quire.server.api.json_encoding import JsonStream, array, encode, encode_streamed
from quire.server.errors import invalid
from quire.server.openai.request_models import ChatBody, ChatMessage, DetokenizeBody, TemplateOptions, TokenizeBody
from quire.server.openai.response_builder import ApiRequest
from quire.server.options import Limits
from quire.server.service import Service
from quire.text.chat_template import Message
from quire.text.tokenizer import Tokenizer

Prompt = str | list[int]
_TOKENS_AT_ONCE = 4096  # that are encoded in one call, which keeps all other threads from running
_TEMPLATE_ARGUMENTS = frozenset(("messages", "add_generation_prompt", "continue_final_message"))


def parse_prompts(prompt: Any) -> list[Prompt]:  # noqa: ANN401 (JSON)
    """Tell one prompt from a list of them. InvalidRequestError for anything that is neither text nor a list."""
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


async def prepare_prompts(service: Service, api_request: ApiRequest, prompts: list[Prompt]) -> ApiRequest:
    """Return the call with a request for each prompt. InvalidRequestError for the first that cannot be served."""
    adds_special_tokens = api_request.body.add_special_tokens is not False
    tokenize = partial(service.client.inputs.tokenize, add_special_tokens=adds_special_tokens)
    return await _prepared(service, api_request, tokenize, prompts)


async def prepare_chat(service: Service, api_request: ApiRequest, body: ChatBody) -> ApiRequest:
    """Return the call with the request for its conversation."""
    text = await _rendered(service, body.messages, body, api_request.client_id)
    tokenize = partial(service.client.inputs.tokenize_rendered, add_special_tokens=bool(body.add_special_tokens))
    return await _prepared(service, api_request, tokenize, [text])


async def tokenized(service: Service, body: TokenizeBody, client_id: str) -> bytes:
    """Return the answer to /tokenize."""
    tokenizer = _tokenizer(service)
    if (body.prompt is None) == (body.messages is None):
        invalid("give either prompt or messages", param="prompt")
    text, adds_special_tokens = body.prompt or "", body.add_special_tokens is not False
    if body.messages is not None:
        text = await _rendered(service, body.messages, body, client_id)
        adds_special_tokens = bool(body.add_special_tokens)  # a template names them itself

    def answer() -> bytes:
        tokens = tokenizer.encode(text, adds_special_tokens)
        parts = [tokens[start : start + _TOKENS_AT_ONCE] for start in range(0, len(tokens), _TOKENS_AT_ONCE)]
        texts = (encode([tokenizer.token_text(token) for token in part]) for part in parts)
        return b"".join(encode_streamed({
            "count": len(tokens),
            "max_model_len": service.client.ready.limits.max_model_len,
            "tokens": JsonStream(array(map(encode, parts))),
            "token_strs": JsonStream(array(texts)) if body.return_token_strs else None,
        }))

    return await service.threads.run(len(text), answer, client_id)


async def detokenized(service: Service, body: DetokenizeBody, client_id: str) -> bytes:
    """Return the answer to /detokenize. Special tokens are part of the text."""
    tokenizer = _tokenizer(service)

    def answer() -> bytes:
        tokens, vocab_size = check_token_ids("tokens", body.tokens), service.client.ready.vocab_size
        if max(tokens, default=0) >= vocab_size:
            refuse("tokens", max(tokens), f"token ids below the vocabulary size of {vocab_size}")
        return encode({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})

    return await service.threads.run(len(body.tokens) if isinstance(body.tokens, list) else 0, answer, client_id)


def _tokenizer(service: Service) -> Tokenizer:
    if service.client.tokenizer is None:
        invalid("the model has no tokenizer", param="model")
    return service.client.tokenizer


async def _rendered(
    service: Service, messages: list[ChatMessage], options: TemplateOptions, client_id: str
) -> str:
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
        limits=service.options,
        client_id=client_id,
    )


def _as_message(message: ChatMessage) -> Message:
    """Return a message as it came: a template may ask whether a key is there."""
    named = {name: getattr(message, name) for name in ("role", "content") if name in message.model_fields_set}
    return named | (message.model_extra or {})


async def _prepared(
    service: Service, api_request: ApiRequest, tokenize: Callable[[Any], TokenizedPrompt], prompts: Sequence[Any]
) -> ApiRequest:
    """Tokenize all prompts, check what they come to, and only then number them.

    A prompt that does not fit is told before what all come to: clients look for that, and shorten it.
    """
    limits, params, body = service.client.inputs.limits, api_request.params, api_request.body
    client_id = api_request.client_id

    def prepare() -> list[PreparedRequest]:
        tokenized: list[TokenizedPrompt] = []
        num_tokens = 0
        for prompt in prompts:
            tokenized.append(tokenize(prompt).salted(body.cache_salt, api_request.key_number))
            limits.check_admissible(len(tokenized[-1].token_ids), params.max_tokens or 1, params.n)
            num_tokens += len(tokenized[-1].token_ids)
            _check_total(num_tokens, params, service.options)
        weight, priority = service.options.weight_of(api_request.key_number), body.priority or 0
        return [
            service.client.prepare(prompt, params, api_request.beam, priority, client_id, weight)
            for prompt in tokenized
        ]

    return replace(api_request, requests=await service.threads.run(sum(map(len, prompts)), prepare, client_id))


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
