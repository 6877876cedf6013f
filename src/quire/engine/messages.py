"""Messages between the server and the engine process, each in a frame (`quire.core.frames`).

Both ends are of the same version, joined by one socket pair, so nothing is negotiated. The end of the stream means that
the other process has ended.
"""

from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Literal, get_args

import msgspec

from quire.core.block_map import BlockMap, Tier
from quire.core.deltas import Admission, BlockLife, SequenceDelta, WaitReason
from quire.core.errors import USER_ERRORS, EngineError, error_of
from quire.core.images import ImageInputs
from quire.core.lora import Adapter, AdapterUse
from quire.core.outputs import KVStats
from quire.core.plan import GraphCounts
from quire.core.pooling import PoolerConfig
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.step_times import StepTimes, StepTiming, StepWork
from quire.core.token_ids import PackedTokens
from quire.engine.launcher import Start
from quire.scheduling.limits import AdmissionLimits

FAULT = "fault"           # the kind of a Failed that no setting of the user caused
MAX_FAILURE_CHARS = 2000  # bound on its message: assertions may show whole tables, and clients receive it


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling parameters of requests that leave them out: values of `SamplingParams`, by their names.

    `max_output_tokens` bounds every answer of a server.
    """

    params: dict[str, float | int | bool] = {}
    max_output_tokens: int | None = None


NO_DEFAULTS = SamplingDefaults()


# --- to the engine ----------------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Queue a request, checked against the limits of the last report."""

    request: Request


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Abort a request, if it has not ended, and release what it has pinned."""

    request_id: int


class Finish(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """Finish one branch at a stop string, if it has not ended."""

    request_id: int
    index: int


class GetBlocks(msgspec.Struct, tag="get_blocks", array_like=True, frozen=True):
    """Request the contents of blocks [first, first + count), answered between two steps. `number` identifies it."""

    number: int
    first: int
    count: int
    tier: Tier = "kv"


class ReadAdapter(msgspec.Struct, tag="read_adapter", array_like=True, frozen=True):
    """Read the LoRA adapter of a folder, in another thread. `number` identifies it."""

    number: int
    folder: str


class StartProfile(msgspec.Struct, tag="start_profile", array_like=True, frozen=True):
    """Start a profile. `number` identifies the command."""

    number: int


class StopProfile(msgspec.Struct, tag="stop_profile", array_like=True, frozen=True):
    """End the profile, and send it. `number` identifies the command."""

    number: int


Tag = Literal["weights", "kv_cache"]                # memory of an engine that sleeps
TAGS: frozenset[Tag] = frozenset(get_args(Tag))


class Sleep(msgspec.Struct, tag="sleep", array_like=True, frozen=True):
    """Free the KV cache of an engine without requests; at level 2 the weights as well. `number` identifies it."""

    number: int
    level: int


class Wake(msgspec.Struct, tag="wake", array_like=True, frozen=True):
    """Load or make again what the tags name, of a sleeping engine. `number` identifies it."""

    number: int
    tags: tuple[Tag, ...]


class SaveSession(msgspec.Struct, tag="save_session", array_like=True, frozen=True):
    """Copy the blocks that a request has pinned into a store in `folder`. `number` identifies the command."""

    number: int
    request_id: int
    folder: str


class OpenSession(msgspec.Struct, tag="open_session", array_like=True, frozen=True):
    """Load from the store of a saved session in `folder` until it is closed, if it has this identity."""

    number: int
    request_id: int     # the request is about to be added
    folder: str
    num_blocks: int     # blocks of tokens in the store; 0: there is none
    identity: str       # `KVIdentity.as_json`


class CloseSession(msgspec.Struct, tag="close_session", array_like=True, frozen=True):
    """Load no more from the store of a saved session that was opened for a request."""

    request_id: int


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Send a report as soon as possible: an idle engine sends its state after every command."""


# Parameters of texts, which the server alone reads: prompts and outputs are token ids here.
OF_TEXTS = frozenset((
    "stop", "bad_words", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens",
))  # fmt: skip
_PARAMS = [(each.name, each.default) for each in fields(SamplingParams) if each.name not in OF_TEXTS]
_STATE_OF_ENGINE = frozenset((   # fields of a request that the engine sets
    "arrived_s", "live", "prompt_logprobs", "prompt_scores", "queue_key", "must_see_tokens", "num_preemptions",
    "num_cached_tokens", "num_disk_tokens", "num_peer_tokens", "waited", "num_recomputed_tokens", "num_swapped_blocks",
    "num_stateless_tokens",
))  # fmt: skip
_SENT = [
    (each.name, each.default) for each in fields(Request) if each.name not in _STATE_OF_ENGINE | {"params"}
]


def add_message(request: Request) -> tuple[str, dict[str, object]]:
    """Return the Add of a request: what the engine reads, where it is not the default."""
    given = request.params
    params = {name: value for name, default in _PARAMS if (value := getattr(given, name)) is not default}
    sent = {name: value for name, default in _SENT if (value := getattr(request, name)) is not default}
    return "add", sent | {"params": params}


Command = (
    Start | AddRequest | Abort | Finish | GetBlocks | ReadAdapter | StartProfile | StopProfile | Sleep | Wake | Ping
    | SaveSession | OpenSession | CloseSession
)


# --- from the engine --------------------------------------------------------------------------------------------------


class Located(msgspec.Struct, tag="located", array_like=True, frozen=True):
    """The model was found; its weights are about to be read. `folder`: that, or the GGUF file, of its tokenizer."""

    folder: str


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine accepts requests. Sizes in bytes, lengths in tokens."""

    limits: AdmissionLimits
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    num_swap_blocks: int = 0
    quantization: str = ""  # described in words; empty: none
    kv_cache_dtype: str = ""  # dtype of a quantized KV cache; empty: none
    sampling: SamplingDefaults = NO_DEFAULTS
    pooler: PoolerConfig | None = None  # None: the model gives no vectors
    no_pooler_reason: str = ""  # for which it gives none
    generates: bool = True  # False: it has no output head
    sliding_window: int | None = None  # as in CacheConfig
    images: ImageInputs | None = None  # None: it reads text alone
    no_images_reason: str = ""  # for which it reads text alone
    slot_bytes: int = 0  # a sequence's states; 0: the model keeps none


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not start, or ends after a fault. `kind` names an error of the settings or the model."""

    kind: str
    message: str


class EngineState(msgspec.Struct, array_like=True, frozen=True):
    """Gauges and counters after a step. `kv` is None only before the first."""

    num_running: int
    num_waiting: int
    num_swapped: int
    kv: KVStats | None = None
    pins: tuple[int, ...] = ()          # requests with pinned prompts
    num_pinned_blocks: int = 0          # as in AdmissionLimits
    num_running_seqs: int = 0           # sequences that run
    waits_for: WaitReason | None = None  # reason of the next waiting request
    num_deferred: int = 0               # waiting requests that the last step skipped
    adapters: AdapterUse | None = None  # None: not counted with this report
    prompts_left: StepWork = StepWork()  # prompt tokens of running requests that are not computed yet
    step_times: StepTimes | None = None  # prices of steps; None: nothing was measured yet
    num_itl_unmet: int = 0              # steps in which decodes left no time for a prompt that wanted some
    graphs: GraphCounts = GraphCounts()  # after the last step
    shares: dict[str, float] | None = None  # as `FairShare.served`; None: not counted with this report
    kv_events: bytes = b""              # what can be found in the cache since the last report: `TreeWithEvents`


class Stepped(msgspec.Struct, tag="stepped", array_like=True, frozen=True):
    """Results of one step. Times are of the monotonic clock, which all processes of a machine share."""

    started_s: float
    num_computed_tokens: int
    admissions: list[Admission]
    deltas: list[SequenceDelta]
    state: EngineState
    preempted: list[int] = []           # ids of requests
    timing: StepTiming | None = None    # None: nothing was computed
    block_lives: list[BlockLife] = []   # measured blocks that were evicted
    chunks: list[tuple[int, int]] = []  # requests with a prompt that is not computed yet: ids, tokens that are


class Idle(msgspec.Struct, tag="idle", array_like=True, frozen=True):
    """No request waits or runs; the engine sleeps until the next command."""

    state: EngineState


class Alive(msgspec.Struct, tag="alive", array_like=True, frozen=True):
    """The current step is long, and makes progress."""


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """The process of an engine of several ranks runs, whatever its step does."""


class RequestRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A request cannot run because of pins that its sender did not know of yet, or cannot pin."""

    request_id: int
    message: str
    param: str | None
    code: str | None


class BlocksReply(msgspec.Struct, tag="blocks_reply", array_like=True, frozen=True):
    """The answer to a GetBlocks."""

    command: GetBlocks
    map: BlockMap


class AdapterReply(msgspec.Struct, tag="adapter_reply", array_like=True, frozen=True):
    """The answer to a ReadAdapter. `adapter` is None for one that cannot be read, for the reason `error`."""

    command: ReadAdapter
    adapter: Adapter | None
    error: str = ""


class Profile(msgspec.Struct, array_like=True, frozen=True):
    """Profile of an engine.

    `ops`: name, kind and seconds of each op of the layers, in their order; empty where they are not timed. `frames`:
    function, file and line; `stacks`: numbers of frames, outermost first; `threads`: by name, the number of a stack and
    the seconds for which it was seen, one after the other.
    """

    seconds: float
    ops: list[tuple[str, str, float]]
    frames: list[tuple[str, str, int]]
    stacks: list[list[int]]
    threads: dict[str, list[tuple[int, float]]]


class ProfileReply(msgspec.Struct, tag="profile_reply", array_like=True, frozen=True):
    """The answer to a StartProfile or StopProfile. `is_done`: False if a profile ran already, or none did."""

    command: StartProfile | StopProfile
    is_done: bool
    profile: Profile | None = None


class SleepReply(msgspec.Struct, tag="sleep_reply", array_like=True, frozen=True):
    """The answer to a Sleep or Wake. `error`: why the engine sleeps as before, or does not sleep."""

    command: Sleep | Wake
    error: Failed | None = None


SessionCode = Literal[
    "",
    "gone",             # the prefix is pinned no more
    "incompatible",     # the blocks are those of another model, or of other arithmetic
    "unusable",         # the files cannot be written, or read
]


class SessionBlocks(msgspec.Struct, array_like=True, frozen=True):
    """Outcome of saving or finding a session's blocks in its store. `code`: the reason of a failure."""

    num_blocks: int = 0
    num_bytes: int = 0
    identity: str = ""      # `KVIdentity.as_json`
    code: SessionCode = ""
    message: str = ""


class SessionReply(msgspec.Struct, tag="session_reply", array_like=True, frozen=True):
    """The answer to a SaveSession or OpenSession."""

    command: SaveSession | OpenSession
    blocks: SessionBlocks


Report = (
    Located | Ready | Failed | Stepped | Idle | Alive | Beat | RequestRefused | BlocksReply | AdapterReply
    | ProfileReply | SleepReply | SessionReply
)


_ADD_HEAD = b"\x92" + msgspec.msgpack.encode("add")  # an array of two: the tag, and the request


def is_add(message: bytes) -> bool:
    """Return whether a command is an Add, without decoding it."""
    return message.startswith(_ADD_HEAD)


def _packed_tokens(kind: type, value: bytes) -> PackedTokens:
    """Return the prompt of a request: packed, so that no garbage collection looks through it."""
    assert kind is array, f"a field of a command is {kind.__name__}"
    return array("i", value)


decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command, dec_hook=_packed_tokens).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode


# --- errors -----------------------------------------------------------------------------------------------------------

class EngineDeadError(EngineError):
    """The engine process has ended, or could not start; the request is not the cause."""


def failed(error: Exception) -> Failed:
    """Return the message for an error: errors of settings and model by name, all others as faults."""
    kind = next((name for name, mendable in USER_ERRORS.items() if isinstance(error, mendable)), FAULT)
    text = str(error) if kind != FAULT else f"{type(error).__name__}: {error}"
    return Failed(kind, text[:MAX_FAILURE_CHARS].encode(errors="replace").decode())  # file names may be invalid Unicode


def error_from(message: Failed) -> EngineError:
    """Return the error to raise for a message: an EngineDeadError unless its kind is a user's error."""
    return error_of(message.kind, message.message, EngineDeadError)
