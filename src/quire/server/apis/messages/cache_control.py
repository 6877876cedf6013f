"""Blocks marked with `cache_control`: the prefix up to the last of them is pinned for its time to live.

A pin holds what comes before it, so the last mark serves for all. Where a marked block ends in the prompt is the chat
template's affair: the conversation is rendered once more, cut behind the block and with a text that no prompt has, and
the prefix is what both texts begin with. A prefix that finds no room is not pinned, and the request runs.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request

from quire.core.checks import shown
from quire.core.errors import EngineError
from quire.core.token_ids import num_equal_tokens
from quire.engine.processes.base_client import BaseClient
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.server.api.chat import ChatPrompt, rendered
from quire.server.api.pinning import pin_prompt
from quire.server.api.preparation import ApiRequest
from quire.server.apis.messages.messages_bodies import ConversationBody, InputMessage
from quire.server.apis.messages.openai_conversion import deferred_tools, openai_messages, openai_tools, system_blocks
from quire.server.errors import ApiError, invalid
from quire.server.images.image_inputs import ImagePart
from quire.server.service import Service
from quire.text.conversation import plain_part

_TTLS_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_MAX_MARKS = 4      # Anthropic's own bound
_CUT = "\u241cquire-cut-here\u241c"

Json = dict[str, Any]


class Mark(NamedTuple):
    """The last block that is marked: `message` -2 in the tools, -1 in the system text, else the number of a message.

    `block` -1: the whole message; its content is one text.
    """

    message: int
    block: int
    ttl_s: float


class CacheUse(NamedTuple):
    """Tokens of a prefix that is pinned: those that the cache had before, and all."""

    num_read: int = 0
    num_tokens: int = 0


def last_mark(body: ConversationBody) -> Mark | None:
    """Return the last mark of a body; its time is the longest of all. ApiError 400 for an invalid one, or too many."""
    found = list(_marks(body))
    if len(found) > _MAX_MARKS:
        invalid(f"at most {_MAX_MARKS} blocks may have cache_control, got {len(found)}", param="cache_control")
    return found[-1]._replace(ttl_s=max(mark.ttl_s for mark in found)) if found else None


def _marks(body: ConversationBody) -> Iterator[Mark]:
    for number, blocks in ((-2, body.tools), (-1, body.system)):
        yield from _marks_of("tools" if number == -2 else "system", number, blocks)
    for number, message in enumerate(body.messages):
        yield from _marks_of(f"messages[{number}].content", number, message.content)
    if body.cache_control is not None:
        last = len(body.messages) - 1
        content = body.messages[last].content
        block = len(content) - 1 if isinstance(content, list) else -1
        yield Mark(last, block, _ttl_s("cache_control", body.cache_control))


def _marks_of(where: str, number: int, blocks: object) -> Iterator[Mark]:
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        control = block.get("cache_control") if isinstance(block, dict) else None
        if control is not None:
            yield Mark(number, index, _ttl_s(f"{where}[{index}].cache_control", control))


def _ttl_s(where: str, control: object) -> float:
    given = control if isinstance(control, dict) else {}
    ttl = given.get("ttl")
    if given.get("type") != "ephemeral" or not isinstance(ttl, str | None) or ttl not in _TTLS_S:
        expected = '{"type": "ephemeral"}, with or without "ttl": "5m" or "1h"'
        invalid(f"{where} must be {expected}, got {shown(control)}", param=where.partition("[")[0].partition(".")[0])
    return _TTLS_S[ttl]


def cut_conversation(body: ConversationBody, mark: Mark, whole: ChatPrompt) -> ChatPrompt:
    """Return the conversation up to the marked block, and a text that no prompt has behind it."""
    if mark.message == -2:
        extra = {"type": "function", "function": {"name": "cut", "description": _CUT, "parameters": {}}}
        shown = {tool["function"]["name"] for tool in whole.tools}
        cut_tools = openai_tools(body.tools[: mark.block + 1])
        return replace(whole, tools=[*(tool for tool in cut_tools if tool["function"]["name"] in shown), extra])
    cut: list[Json] = []
    if mark.message == -1:
        # A billing header that was left out has no mark.
        cut = openai_messages(system_blocks(body.system[: mark.block + 1]), (), {})
    else:
        message = body.messages[mark.message]
        content = message.content if mark.block < 0 else message.content[: mark.block + 1]
        last = InputMessage(role=message.role, content=content)
        cut = openai_messages(
            system_blocks(body.system), [*body.messages[: mark.message], last], deferred_tools(body.tools),
            reads_images=whole.reads_images,
        )  # fmt: skip
    if cut and isinstance(cut[-1]["content"], list) and cut[-1]["content"] and "tool_calls" not in cut[-1]:
        *earlier, text = cut[-1]["content"]
        texts = [text, plain_part(_CUT)] if isinstance(text, ImagePart) else [plain_part(text["text"] + _CUT)]
        cut[-1] = cut[-1] | {"content": [*earlier, *texts]}
    if not cut or cut[-1]["role"] == "system" or "tool_calls" in cut[-1]:
        cut.append({"role": "user", "content": _CUT})
    return replace(whole, messages=cut, add_generation_prompt=True, continue_final_message=False)


def _common_prefix(left: str, right: str) -> str:
    """Return the longest text that both begin with, by bisection: texts have 100,000 characters."""
    length = bisect_left(range(min(len(left), len(right))), True, key=lambda at: left[: at + 1] != right[: at + 1])
    return left[:length]


class CachedPrefixes:
    """Prefixes pinned for `cache_control`: one that is asked for again lives on, one that another extends is let go.

    Neither makes a prefix expire earlier.
    """

    def __init__(self) -> None:
        self._pinned: dict[str, TokenizedPrompt] = {}   # keyed by the ids of pins

    async def use(
        self, request: Request, service: Service, call: ApiRequest, conversation: ChatPrompt, cut: ChatPrompt,
        ttl_s: float,
    ) -> CacheUse | None:  # fmt: skip
        """Pin the prefix that a call's prompt has in common with a cut conversation; None if it is not pinned."""
        options, prompt = service.options, call.requests[0].prompt
        ttl_s = min(ttl_s, options.pin_ttl or ttl_s)
        inputs = service.client.inputs

        def tokenize() -> TokenizedPrompt:
            prefix = inputs.tokenize_rendered(
                _common_prefix(prompt.text or "", text), add_special_tokens=conversation.adds_special_tokens
            )
            # Pins end in front of the first image: they are found by their tokens alone.
            stop = min(len(prefix.token_ids), *(image.start for image in prompt.images), len(prompt.token_ids))
            return prompt._replace(text=None, images=(), token_ids=prompt.token_ids[: num_equal_tokens(
                prefix.token_ids, prompt.token_ids, stop
            )])

        try:
            text, _ = await rendered(service, cut, call.client_id)
            prefix = await service.threads.run(len(text), tokenize, call.client_id)
            if len(prefix.token_ids) < service.client.ready.limits.block_size:
                return None
            if (known := self._find(service.client, prefix)) is not None:
                service.client.renew_prefix(known, ttl_s)
                return CacheUse(len(prefix.token_ids), len(prefix.token_ids))
            pinned = await pin_prompt(
                request, service, lambda: prefix, weight=1, ttl_s=ttl_s, external_id=f"{call.id}-cache",
                arrival_s=time.monotonic(),
            )  # fmt: skip
        except (ApiError, EngineError):
            return None
        service.client.renew_prefix(pinned.prefix.id, self._let_go_of(service.client, prefix))
        self._pinned[pinned.prefix.id] = prefix
        return CacheUse(pinned.num_cached_tokens, len(prefix.token_ids))

    def _find(self, client: BaseClient, prefix: TokenizedPrompt) -> str | None:
        """Return the id of a pin that begins with a prefix, of the same key, salt and adapter."""
        self._forget_ended(client)
        return next((id_ for id_, known in self._pinned.items() if _extends(known, prefix)), None)

    def _let_go_of(self, client: BaseClient, prefix: TokenizedPrompt) -> float:
        """Unpin what a new pin extends: each turn of a conversation pins the turns before it again.

        Returns the most seconds that one of them had left, 0 if there is none.
        """
        self._forget_ended(client)
        extended = [id_ for id_, known in self._pinned.items() if _extends(prefix, known)]
        left_s = max(map(client.pinned.remaining_s, extended), default=0.0)
        for id_ in extended:
            client.unpin(client.pinned.remove(id_, None))
            del self._pinned[id_]
        return left_s

    def _forget_ended(self, client: BaseClient) -> None:
        self._pinned = {id_: known for id_, known in self._pinned.items() if id_ in client.pinned}


def _extends(longer: TokenizedPrompt, shorter: TokenizedPrompt) -> bool:
    length = len(shorter.token_ids)
    return (
        _scope(longer) == _scope(shorter)
        and len(longer.token_ids) >= length
        and num_equal_tokens(longer.token_ids, shorter.token_ids, length) == length
    )


def _scope(prompt: TokenizedPrompt) -> tuple[int, str | None, str | None]:
    """Return what two prompts have in common that find each other's blocks, and belong to one key."""
    return prompt.key_number, prompt.cache_salt, None if prompt.adapter is None else prompt.adapter.digest
