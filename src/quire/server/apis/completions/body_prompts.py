"""Preprocessing: prompts and conversations of OpenAI's bodies, in the form in which they are tokenized."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from quire.core.checks import refuse
from quire.engine.requests.input_processor import Truncation
from quire.server.api.chat import ChatPrompt, template_variables
from quire.server.api.preparation import prepare
from quire.server.apis.completions.completion_bodies import ChatBody, ChatMessage, GenerationBody, TokenizeBody
from quire.server.apis.completions.openai_response import OpenAIRequest
from quire.server.errors import invalid
from quire.server.grammars.grammar_checker import CONSTRAINT_FIELDS
from quire.server.options import Limits
from quire.server.service import Service
from quire.text.conversation import Message
from quire.text.tools import Tool

Prompt = str | list[int]


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


def constraint_fields(body: GenerationBody) -> dict[str, Any]:
    """Return the fields of a body that ask for a grammar."""
    return {name: value for name in CONSTRAINT_FIELDS if (value := getattr(body, name)) is not None}


async def prepare_prompts(service: Service, call: OpenAIRequest, prompts: list[Prompt]) -> None:
    """Add an engine request for each prompt of a call. InvalidRequestError for the first invalid one."""
    tokenize = partial(
        service.client.inputs.tokenize, add_special_tokens=call.body.add_special_tokens is not False,
        truncation=truncation_of(service, call),
    )  # fmt: skip
    await prepare(service, call, tokenize, prompts)


def truncation_of(service: Service, call: OpenAIRequest) -> Truncation | None:
    """Return the truncation of the prompts; from the left unless the body says otherwise, as in vLLM."""
    return service.client.inputs.truncation_of(call.params, keeps_last=call.body.truncation_side != "right")


def conversation_of(
    body: ChatBody | TokenizeBody, messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> ChatPrompt:
    """Return the conversation of a body. InvalidRequestError for variables of the template that are fields."""
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    variables = template_variables(body.reasoning_effort, body.chat_template_kwargs)
    if isinstance(body, ChatBody) and body.documents is not None:
        variables |= {"documents": _checked_documents(body.documents)}
    return ChatPrompt(
        messages=[_as_message(message) for message in messages],
        tools=tools,
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        variables=variables,
        adds_special_tokens=bool(body.add_special_tokens),
    )


def _checked_documents(documents: object) -> list[dict[str, Any]]:
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        refuse("documents", documents, "a list of objects")
    return documents


def _as_message(message: ChatMessage) -> Message:
    """Return a message with the keys that were sent: a template may test whether a key is present."""
    named = {name: getattr(message, name) for name in ("role", "content") if name in message.model_fields_set}
    return named | (message.model_extra or {})
