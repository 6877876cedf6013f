"""API request: the checked parameters of one HTTP request for generation, independent of the dialect it came in."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.requests.input_processor import CheckedParams, PreparedRequest
from quire.server.tools.served_formats import OutputReading
from quire.server.tools.tool_use import NO_TOOLS, ToolUse


@dataclass(slots=True, kw_only=True)
class ApiRequest:
    """Parameters of one call, checked once; its preparation adds the rest.

    A dialect's subclass adds what only its responses depend on.
    """

    id: str
    model: str
    created: int                                # seconds since 1970
    checked: CheckedParams
    received_s: float = 0.0                     # when its body had arrived, on the monotonic clock
    stream: bool = False
    cuts_max_tokens: bool = False               # to what fits behind the prompt; otherwise the call is refused
    hides_output: bool = False                  # the client wants no token; the engine generates at least one
    cache_salt: str | None = None
    key_number: int = 0                         # number of the API key, from 1; 0: none
    client_id: str = ""                         # see quire.server.http.api_keys.client_id_of
    tools: ToolUse = NO_TOOLS
    max_reasoning_tokens: int | None = None     # bound per output; then the end of reasoning is forced
    names_tokens_by_id: bool = False            # default for logprobs; a body may say otherwise
    tells_times: bool = False                   # the response has the times of its only answer
    constraint_field: str = "structured_outputs"  # field of the body that asks for the output's grammar
    deadline_field: str = "deadline_ms"         # or the header that params.deadline_ms is from
    requests: Sequence[PreparedRequest] = ()    # one per prompt, once the prompts are tokenized
    reading: OutputReading | None = None        # None: outputs are content, without calls and reasoning

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return len(self.requests) * self.checked.params.n
