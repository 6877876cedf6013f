"""Limits of the work that a grammar may take, for every process that compiles one. In llguidance's own units."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

NOTHING_FOLLOWS = "NoExtensionBias"  # reason of a stop, and start of an error

GRAMMAR_LIMITS: Mapping[str, Any] = {
    "max_lexer_states": 4_000,    # 1 to 2 kB each; the schemas of SchemaStore need less than 2,000
    "step_lexer_fuel": 100_000,   # for one mask, 14,000 per ms
    "step_max_items": 20_000,     # for one mask, 20,000 per ms
    "max_grammar_size": 200_000,
    "verbose_errors": False,      # they would quote the output of a request
}


def has_text(matcher: "LLMatcher") -> bool:
    """Return whether a matcher allows any text from where it is; True if it has failed."""
    if matcher.is_error() or matcher.is_accepting():
        return True
    matcher.compute_bitmask()  # an error if nothing follows
    return not str(matcher.get_error()).startswith(NOTHING_FOLLOWS)
