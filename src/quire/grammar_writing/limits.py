"""Limits of the work that a grammar may take, for every process that compiles one. In llguidance's own units."""

from collections.abc import Mapping
from typing import Any

GRAMMAR_LIMITS: Mapping[str, Any] = {
    "max_lexer_states": 4_000,    # of 1 to 2 kB each; the schemas of SchemaStore need less than 2,000
    "step_lexer_fuel": 100_000,   # of one mask, 14,000 per ms
    "step_max_items": 20_000,     # of one mask, 20,000 per ms
    "max_grammar_size": 200_000,
    "verbose_errors": False,      # they would quote the output of a request
}
