"""Field `kv_transfer_params` of completions, in vLLM's form: prefill apart from decoding.

A router sends a request to a producer with `do_remote_decode`, and gets a ticket for the prompt's keys and values with
the answer. The same request with that ticket, in `do_remote_prefill`, goes to a consumer. Names of engines are those of
the operator's file: no address is taken from a request.
"""

import hashlib
import re
import secrets
from typing import Any

from quire.core.checks import check_int, refuse
from quire.core.owner_labels import OPERATOR
from quire.core.sampling_params import MIN_SEED, NUM_SEEDS
from quire.core.sequence import KVTransfer
from quire.server.api.request_bodies import MAX_HTTP_SEED
from quire.server.apis.completions.completion_bodies import GenerationBody
from quire.server.errors import invalid
from quire.server.service import Service

UNAVAILABLE = "kv_transfer_unavailable"
_FIELD = "kv_transfer_params"
_TICKET = re.compile("[0-9a-f]{64}")


def transfer_of(service: Service, body: GenerationBody, key_number: int) -> KVTransfer | None:
    """Return what a body asks for; None: nothing. ApiError 400 for what cannot be, or is not served here."""
    params = body.kv_transfer_params
    if not params:
        return None
    keeps, fetches = (_flag(params, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if not keeps and not fetches:
        return None
    if keeps and fetches:
        invalid(f"{_FIELD}: do_remote_decode and do_remote_prefill are both true", param=_FIELD)
    role = "producer" if keeps else "consumer"
    options = service.engine_options
    if options is None or not (options.is_kv_producer if keeps else options.is_kv_consumer):
        name = "do_remote_decode" if keeps else "do_remote_prefill"
        invalid(f"{_FIELD}.{name} needs a server with kv_role {role} or both", param=_FIELD, code=UNAVAILABLE)
    if body.prompt_logprobs is not None or body.prompt_logprob_token_ids is not None or body.echo:
        invalid(f"{_FIELD} does not go with prompt_logprobs, prompt_logprob_token_ids and echo: they need the whole "
                "prompt computed where the answer is made", param=_FIELD)  # fmt: skip
    owner = _owner(service, key_number)
    if keeps:
        if body.stream:
            invalid(f"{_FIELD}.do_remote_decode needs stream false: the answer has the ticket", param=_FIELD)
        return KVTransfer(secrets.token_hex(32), owner)
    peer, ticket = params.get("remote_engine_id"), params.get("remote_request_id")
    if not isinstance(peer, str) or not peer:
        refuse(f"{_FIELD}.remote_engine_id", peer, "the name of an engine in kv_peers")
    if not isinstance(ticket, str) or _TICKET.fullmatch(ticket) is None:
        refuse(f"{_FIELD}.remote_request_id", ticket, "a ticket: 64 hexadecimal digits of a producer's answer")
    return KVTransfer(ticket, owner, peer)


def seed_of(body: GenerationBody) -> int | None:
    """Return the seed that came with the ticket, where the body has none: the producer has drawn a token by it."""
    params = body.kv_transfer_params or {}
    seed = params.get("seed")
    if body.seed is not None or seed is None or not params.get("do_remote_prefill"):
        return None
    return check_int(f"{_FIELD}.seed", seed, MIN_SEED, MAX_HTTP_SEED)


def params_of_answer(service: Service, transfer: KVTransfer, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return the field of a producer's answer to a prompt of so many tokens, in vLLM's form, with the seed.

    Seeds count modulo NUM_SEEDS, and those of bodies have a sign.
    """
    options = service.engine_options
    assert options is not None, "a producer"
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": options.kv_name,
        "remote_request_id": transfer.ticket, "remote_block_ids": [], "remote_host": options.kv_host,
        "remote_port": options.kv_port, "tp_size": 1, "remote_num_tokens": num_tokens,
        "seed": seed if seed <= MAX_HTTP_SEED else seed - NUM_SEEDS,
    }  # fmt: skip


def _flag(params: dict[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(f"{_FIELD}.{name}", value, "true or false")
    return bool(value)


def _owner(service: Service, key_number: int) -> str:
    """Return the digest of the key that a request carries, the same on all servers that know it; empty without one."""
    if not key_number:
        return ""
    options = service.options
    key = options.operator_api_key if key_number == OPERATOR else options.api_key[key_number - 1]
    return hashlib.sha256((key or "").encode()).hexdigest()
