"""Constraints of outputs: the interface between the routes and the optional checks of grammars.

A service has at most one `OutputConstraints`. Without one, requests with grammars are refused.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from quire.core.structured_outputs import StructuredOutputsParams

# Fields of bodies that constrain the output.
CONSTRAINT_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern", "structural_tag",
)  # fmt: skip


class OutputConstraints(Protocol):
    """Checks of what clients send as constraints, in a process with limits."""

    applies_in_reasoning: bool      # grammars hold from the first token on, not behind the reasoning alone

    async def check(self, given: Mapping[str, Any], client_id: str = "") -> StructuredOutputsParams | None:
        """Return the grammar of a body's CONSTRAINT_FIELDS, checked; None if they ask for nothing.

        InvalidRequestError names the field and the reason; ApiError 429 where too many requests wait.
        """

    async def check_grammar(self, grammar: str, name: str, client_id: str = "") -> None:
        """Compile a grammar that was made of the field `name`. Errors are those of `check`."""

    async def close(self) -> None:
        """End the process."""
