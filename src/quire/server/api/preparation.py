"""API request: its checked parameters, its deadlines and grammar, and the tokens of its prompts.

Nothing is queued before all prompts of a call are prepared; all but short ones are tokenized off the event loop. A call
is refused when its first token cannot be there in time, before work is done for it. It is checked three times: before
its prompt is rendered, by the work queued before it; before it is tokenized, by half of the tokens that its text is
likely to have; and when it is about to be queued.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request

from quire.core.checks import check_int, refuse
from quire.core.logprob_table import width_of
from quire.core.owner_labels import OPERATOR
from quire.core.sampling_params import MAX_DEADLINE_MS, SamplingParams
from quire.core.step_times import StepWork, chunk_work
from quire.engine.processes.forecast import Asked
from quire.engine.requests.input_processor import CheckedParams, PreparedRequest, TokenizedPrompt
from quire.server.api.request_bodies import Milliseconds
from quire.server.errors import deadline_unmeetable, invalid
from quire.server.options import Limits
from quire.server.service import Service
from quire.server.tools.served_formats import NO_TOOLS, OutputReading, ToolUse


@dataclass(slots=True, kw_only=True)
class ApiRequest:
    """Parameters of one call, checked once; its preparation adds the rest.

    A dialect's subclass adds what only its responses depend on.
    """

    id: str
    model: str
    created: int                                # seconds since 1970
    checked: CheckedParams
    received_s: float = 0.0                     # when its body had arrived, on the monotonic clock; as the next four
    checked_s: float = field(default_factory=time.monotonic)
    grammar_s: float | None = None              # when its grammar was ready; None: it has none of its own
    rendered_s: float | None = None             # when its prompt was text; None: it was so in the body
    tokenized_s: float | None = None
    stream: bool = False
    cuts_max_tokens: bool = False               # to what fits behind the prompt; otherwise the call is refused
    hides_output: bool = False                  # the client wants no token; the engine generates at least one
    cache_salt: str | None = None
    key_number: int = 0                         # number of the API key, from 1; 0: none
    client_id: str = ""                         # see quire.server.http.application.client_id_of
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


HEADER = "x-request-deadline-ms"
_HEADER = HEADER.encode()
CHARS_PER_TOKEN = 8     # about twice as many as texts have: an estimate refuses only what is far from its bound
_MAX_DIGITS = len(str(MAX_DEADLINE_MS))


class WithDeadlines(Protocol):
    """A body with the fields of deadlines."""

    ttft_deadline_ms: Milliseconds
    deadline_ms: Milliseconds


def deadlines_of(request: Request, body: WithDeadlines) -> dict[str, object]:
    """Return the deadlines of a call as fields of `SamplingParams`: of the header and `deadline_ms` the smallest.

    Several lines of a header are the same as one with commas: a proxy may join them (RFC 9110, section 5.3).
    InvalidRequestError names the field, or the header.
    """
    given: dict[str, object] = {}
    for name in ("ttft_deadline_ms", "deadline_ms"):
        if (value := getattr(body, name)) is not None:
            given[name] = check_int(name, value, 1, MAX_DEADLINE_MS)
    sent: list[int] = []
    for name, value in request.scope["headers"]:
        if name == _HEADER:
            sent += map(_of_header, value.decode("latin-1").split(","))
    if sent:
        own = [] if body.deadline_ms is None else [body.deadline_ms]
        given["deadline_ms"] = min(sent + own)
    return given


def deadline_field(body: WithDeadlines, params: SamplingParams) -> str:
    """Return the name of what `params.deadline_ms` is from: the field of the body, or the header."""
    return "deadline_ms" if params.deadline_ms == body.deadline_ms else HEADER


def check_deadline(service: Service, call: ApiRequest, num_chars: int = 0) -> None:
    """Raise ApiError 429 if the first token of a call cannot be there in time. `num_chars`: of prompts, not tokenized.

    With several prompts, the deadline holds for the last prompt's first token.
    """
    params = call.checked.params
    if params.ttft_deadline_ms is None and params.deadline_ms is None:
        return
    field, asked_s = _first_deadline(call)
    request = call.requests[0].request if len(call.requests) == 1 else None
    prompts = [len(prepared.prompt.token_ids) for prepared in call.requests] or [num_chars // CHARS_PER_TOKEN]
    work = sum((chunk_work(0, num_tokens) for num_tokens in prompts), StepWork())
    weight = call.requests[0].request.weight if call.requests else 1.0
    asked = Asked(work, call.checked.priority, call.client_id, weight, len(prompts))
    passed_s = time.monotonic() - call.received_s
    predicted_s = service.client.first_token_s(asked, request, asked_s - passed_s)
    if predicted_s > asked_s - passed_s:
        service.metrics.refused("deadline_unmeetable")
        raise deadline_unmeetable(passed_s + predicted_s, asked_s, field)


def _first_deadline(call: ApiRequest) -> tuple[str, float]:
    """Return the field, or header, of the earlier deadline, and its seconds."""
    params = call.checked.params
    fields = {"ttft_deadline_ms": params.ttft_deadline_ms, call.deadline_field: params.deadline_ms}
    given = {name: value / 1e3 for name, value in fields.items() if value is not None}
    return min(given.items(), key=lambda item: item[1])


def _of_header(text: str) -> int:
    text = text.strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not 1 <= int(text) <= MAX_DEADLINE_MS:
        refuse(HEADER, text, f"an integer from 1 to {MAX_DEADLINE_MS}")
    return int(text)


SHORT_CHARS = 512   # longest prompt tokenized at once: at most 0.7 ms, on 2 cores of an AMD EPYC (Zen 4)


def sampling_params(
    service: Service, given: Mapping[str, object], *, is_beam_search: bool = False
) -> SamplingParams:
    """Return the parameters that a body asks for, with the model's defaults for those that it leaves out.

    Of the defaults a beam search has the temperature alone. `given` has `max_tokens`: where it is None the input
    processor bounds the answer. InvalidRequestError for a value or text past its bounds.
    """
    assert "max_tokens" in given, f"a call without max_tokens: {sorted(given)}"

    sampling, most = service.client.inputs.sampling, service.options.max_stop_chars
    defaults = sampling.params
    if is_beam_search:
        defaults = {name: value for name, value in defaults.items() if name == "temperature"}
    params = SamplingParams(**(defaults | dict(given)))  # type: ignore[arg-type]
    if (longest := sampling.max_output_tokens) is not None and params.max_tokens is not None:
        params = replace(params, max_tokens=min(params.max_tokens, longest), min_tokens=min(params.min_tokens, longest))
    for name in ("stop", "bad_words"):
        for text in getattr(params, name) or ():
            if len(text) > most:
                refuse(name, text, f"texts of at most {most} characters (max_stop_chars)")
    return params


async def constrain(service: Service, call: ApiRequest, fields: Mapping[str, Any]) -> None:
    """Add the grammar that a call's CONSTRAINT_FIELDS ask for. Raises as `GrammarChecker.check`."""
    if not fields or fields == {"response_format": {"type": "text"}}:
        return
    name = next(iter(fields))
    params = await service.grammars.check(fields, call.client_id)
    call.grammar_s = time.monotonic()
    if params is None:
        return
    checked = call.checked
    if checked.beam is not None and checked.params.ignore_eos:
        reason = "beams with a complete output end by an end-of-sequence token"
        invalid(f"ignore_eos must be false in a beam search with {name}: {reason}", param="ignore_eos")
    whole = replace(checked.params, structured_outputs=params)
    call.checked = service.client.inputs.check_params(whole, checked.beam, checked.priority, is_own=True)
    call.constraint_field = name


async def prepare(
    service: Service, call: ApiRequest, tokenize: Callable[[Any], TokenizedPrompt], prompts: Sequence[Any]
) -> None:
    """Add an engine request for each prompt of a call.

    A prompt that is too long for the model is reported before the sum: clients look for that error and shorten it.
    """
    num_chars = sum(map(len, prompts))
    if len(prompts) == 1 and num_chars <= SHORT_CHARS and not call.checked.params.bad_words:
        _prepare(service, call, tokenize, prompts)
    else:
        if set(map(type, prompts)) == {str}:
            check_deadline(service, call, num_chars)     # the number of tokens is an estimate here
        work = partial(_prepare, service, call, tokenize, prompts)
        await service.threads.run(num_chars, work, call.client_id)


def _prepare(
    service: Service, call: ApiRequest, tokenize: Callable[[Any], TokenizedPrompt], prompts: Sequence[Any]
) -> None:
    weight = service.options.weight_of(call.key_number)
    requests: list[PreparedRequest] = []
    num_tokens = 0
    for prompt in prompts:
        adapter = service.adapter_of(call.model)
        tokens = tokenize(prompt)._replace(cache_salt=call.cache_salt, key_number=call.key_number, adapter=adapter)
        if call.cuts_max_tokens:
            _cut_max_tokens(service, call, len(tokens.token_ids))
        requests.append(service.client.prepare(tokens, call.checked, call.client_id, weight))
        num_tokens += len(tokens.token_ids)
        _check_total(num_tokens, call.checked.params, service.options)
    if call.reading is not None:
        kept = service.formats.kept_token_ids
        reasoning = call.reading.reasoning
        requests = [request._replace(kept_token_ids=kept, reasoning=reasoning) for request in requests]
    call.requests, call.tokenized_s = tuple(requests), time.monotonic()


def _cut_max_tokens(service: Service, call: ApiRequest, num_prompt_tokens: int) -> None:
    """Bound the answer of a call by what fits behind its prompt, if anything does."""
    inputs, checked, params = service.client.inputs, call.checked, call.checked.params
    most = inputs.limits.most_tokens(num_prompt_tokens, params.n)
    if 0 < most < (params.max_tokens or 0):
        params = replace(params, max_tokens=most)
        call.checked = inputs.check_params(params, checked.beam, checked.priority, is_own=True)


def cut_header(asked: int | None, call: ApiRequest) -> dict[str, str]:
    """Return the header that names the maximum of output tokens if it is lower than the client asked for."""
    most = call.checked.params.max_tokens
    return {} if asked is None or most is None or most >= asked else {"X-Max-Output-Tokens": str(most)}


def _check_total(num_tokens: int, params: SamplingParams, limits: Limits) -> None:
    if num_tokens > limits.max_call_tokens:
        most = limits.max_call_tokens
        invalid(f"the prompts of one call may have at most {most} tokens together (max_call_tokens)", param="prompt")
    if params.prompt_logprobs is None and params.prompt_logprob_token_ids is None:
        return
    num_listed = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    num_each = num_listed + width_of(params.prompt_logprob_token_ids)
    num_logprobs = num_tokens * num_each * params.n
    if num_logprobs > limits.max_prompt_candidates:
        invalid(
            f"{num_tokens} prompt tokens with {num_each} logprobs each and n {params.n} come to "
            f"{num_logprobs} logprobs: one call may have at most {limits.max_prompt_candidates} "
            f"(max_prompt_candidates)",
            param="prompt_logprobs" if num_listed else "prompt_logprob_token_ids",
        )


def check_priority_granted(service: Service, priority: int, key_number: int) -> None:
    """Raise ApiError 400 for a priority below 0 without the right to it."""
    if priority < 0 and key_number != OPERATOR and not service.options.allow_client_priority:
        message = (
            f"priority must be 0 or more, got {priority}: below 0 it needs the operator's key (operator_api_key), or a "
            f"server that grants it to all clients (allow_client_priority)"
        )
        invalid(message, param="priority", code="unsupported_parameter")
