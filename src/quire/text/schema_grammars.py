"""Check of schemas that become grammars: the arguments of calls that are forced. For the template process alone."""

from collections.abc import Iterable, Sequence

from quire.core.errors import InvalidRequestError
from quire.core.grammar_limits import GRAMMAR_LIMITS
from quire.core.grammar_text import closed_json_text, schema_fault
from quire.text.tools import Tool, parameters_of

_MAX_REASON_CHARS = 300


def check_grammars(tools: Sequence[Tool], indices: Iterable[int]) -> None:
    """Raise InvalidRequestError for a tool, of those with these indices, with a schema that no grammar can express.

    Takes the time and the memory of compiling them, which only a process bounds.
    """
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 (a compiled library, only for tools that are forced)

    for index in indices:
        text = f"start: {closed_json_text(parameters_of(tools[index]))}\n"
        error = LLMatcher.validate_grammar(text, None, limits=LLParserLimits(**GRAMMAR_LIMITS))
        if error:
            told = " ".join(schema_fault(error.partition("\n   1 |")[0]).split())[:_MAX_REASON_CHARS]
            raise InvalidRequestError(f"tools[{index}].function.parameters cannot be enforced: {told}", param="tools")
