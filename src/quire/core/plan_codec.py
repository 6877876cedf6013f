"""Codec of plans and results: msgpack, for workers in other processes or on other machines.

A decoded message equals the encoded one, except that arrays and `TokenIds` become lists.
"""

from array import array
from typing import Any

import msgspec

from quire.core.plan import StepPlan, StepResult
from quire.core.token_ids import TokenIds

_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_result_decoder = msgspec.msgpack.Decoder(StepResult)


def _builtin(value: object) -> Any:  # noqa: ANN401
    """Return what stands for an array or for `TokenIds` in msgpack."""
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, TokenIds):
        return value.prompt.tolist() + value.output
    raise NotImplementedError(f"a message with {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_builtin)


def encode(message: StepPlan | StepResult) -> bytes:
    """Return a plan or a result as msgpack."""
    return _encoder.encode(message)


def decode_plan(message: bytes) -> StepPlan:
    """Return the plan that was encoded. Raises msgspec.ValidationError for anything else."""
    return _plan_decoder.decode(message)


def decode_result(message: bytes) -> StepResult:
    """Return the result that was encoded. Raises msgspec.ValidationError for anything else."""
    return _result_decoder.decode(message)
