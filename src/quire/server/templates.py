"""Renders chat templates in a process of their own, with a time limit: a template is a program from outside."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.chat_template import Message


class TemplateRenderer:
    """Conversations to text, off the event loop."""

    async def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation. InvalidRequestError for what the messages or the template get wrong."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the process."""
