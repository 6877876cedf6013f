"""Beam search over HTTP: `use_beam_search` with `n` as the beam width. What a search cannot obey is refused by name."""

from collections.abc import Iterator
from dataclasses import fields

from quire.core.beam_search_params import BeamSearchParams
from quire.core.checks import shown
from quire.core.sampling_params import SamplingParams
from quire.server.errors import invalid
from quire.server.openai.bodies import ChatBody, CompletionBody
from quire.server.openai.sampling import field_names
from quire.server.service import Service

# Of SamplingParams: what a search obeys, what says how tokens become text, and the seed, which it has no use for.
_OBEYED = ("n", "temperature", "max_tokens", "ignore_eos")
_HARMLESS = ("seed", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


def beam_search_params(
    body: CompletionBody | ChatBody, params: SamplingParams, service: Service
) -> BeamSearchParams | None:
    """Return the beam search that a call asks for, if it does. `params` are those that the rest of its body became.

    InvalidRequestError or ApiError 400 names the field that is wrong.
    """
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not body.use_beam_search:
        if length_penalty != 1:
            invalid("length_penalty is only allowed when use_beam_search is true", param="length_penalty")
        return None
    for name, value in _given_in_vain(body, params):
        invalid(f"{name} {shown(value)} is not allowed when use_beam_search is true", param=name)
    with field_names(body):
        beam = BeamSearchParams(params.n, params.max_tokens, params.ignore_eos, params.temperature, length_penalty)
        service.client.inputs.check_params(params, beam)
    return beam


def _given_in_vain(body: CompletionBody | ChatBody, params: SamplingParams) -> Iterator[tuple[str, object]]:
    """Yield each field, with its value, that asks for what a search does not do."""
    if body.stream:
        yield "stream", body.stream
    if isinstance(body, CompletionBody) and body.best_of not in (None, params.n):
        yield "best_of", body.best_of
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        is_default = value == field.default or value in ((), {})
        if not is_default and field.name not in _OBEYED + _HARMLESS:
            yield field.name, value
