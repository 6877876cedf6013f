"""Round trips of every message: the one received equals the one sent."""

import gc
import io
import math
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.block_map import BlockEntry, BlockHolder, BlockMap, BlockOverview, BlockOwner
from quire.core.checks import MAX_INT
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.deltas import WAIT_REASONS, Admission, SequenceDelta, TokenLogprobs
from quire.core.errors import ConfigError, EngineError, ModelError, NotInstalledError
from quire.core.frames import LENGTH_BYTES, frame, read_frame
from quire.core.logprob_table import LogprobTable
from quire.core.outputs import KVStats
from quire.core.pooling import GENERATE, BeamTask, PinTask, Scope
from quire.core.sampling_params import MAX_SEED, MIN_SEED, BeamSearchParams, SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.messages import (
    FAULT,
    MAX_FAILURE_CHARS,
    OF_TEXTS,
    Abort,
    AddRequest,
    BlocksReply,
    Command,
    EngineDeadError,
    EngineState,
    Failed,
    Finish,
    GetBlocks,
    Idle,
    Located,
    Ready,
    Report,
    RequestRefused,
    Start,
    Stepped,
    add_message,
    decode_command,
    decode_report,
    error_from,
    failed,
)
from quire.engine.options import EngineOptions
from quire.scheduling.limits import AdmissionLimits
from quire.scheduling.scheduler import Scheduler, make_cache

st.register_type_strategy(int, st.integers(-(2**63), 2**64 - 1))  # fields that no strategy names: what msgpack takes
counts = st.integers(0, 2**63 - 1)
request_ids = st.integers(-(2**63), 2**63 - 1)
token_ids = st.lists(st.integers(0, MAX_INT), max_size=5)
seconds = st.floats(0, 1e9)
texts = st.text(max_size=20)
strings = st.lists(st.text(min_size=1, max_size=20), max_size=3)
optional_counts = st.none() | st.integers(0, 20)

options = st.builds(
    EngineOptions,
    model=st.none() | texts,
    kv_cache_memory=st.none() | st.integers(1, 2**63 - 1) | st.just("1.5GiB"),
    num_kv_blocks=st.none() | st.integers(1, 2**31),
    enable_prefix_caching=st.booleans(),
    seed=st.integers(MIN_SEED, MAX_SEED),
)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 64),
    temperature=st.integers(0, 100) | st.floats(0, 100),
    top_p=st.floats(1e-6, 1),
    top_k=st.integers(-1, 1000),
    presence_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(MIN_SEED, MAX_SEED),
    stop=st.none() | st.text(min_size=1) | strings,
    stop_token_ids=st.none() | token_ids,
    max_tokens=st.none() | st.integers(20, MAX_INT),
    min_tokens=st.integers(0, 20),
    logprobs=optional_counts,
    prompt_logprobs=optional_counts,
    logit_bias=st.none() | st.dictionaries(st.integers(0, MAX_INT), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, MAX_INT), min_size=1, max_size=3),
    bad_words=st.none() | strings,
    skip_special_tokens=st.booleans(),
    repetition_detection=st.none() | st.just({"max_pattern_size": 4, "min_count": 3}),
)
beams = st.builds(
    BeamSearchParams,
    beam_width=st.integers(1, MAX_INT),
    max_tokens=st.none() | st.integers(1, MAX_INT),
    ignore_eos=st.booleans(),
    temperature=st.floats(0, 100),
    length_penalty=st.floats(-10, 10),
)
requests = st.builds(
    Request,
    request_id=request_ids,
    prompt_token_ids=token_ids.map(pack_tokens),
    params=params,
    seed=st.integers(MIN_SEED, MAX_SEED),
    max_tokens=counts,
    eos_token_ids=st.frozensets(st.integers(0, MAX_INT), max_size=3),
    stop_token_ids=st.frozensets(st.integers(0, MAX_INT), max_size=3),
    bad_words_token_ids=st.lists(token_ids.map(tuple), max_size=3).map(tuple),
    task=st.just(GENERATE) | st.just(PinTask()) | st.builds(BeamTask, beams),
    scope=st.builds(Scope, st.none() | texts, st.none() | texts),
    owner=texts,
)
shows = st.builds(GetBlocks, counts, counts, counts)
commands = st.one_of(
    st.builds(Start, options),
    st.builds(AddRequest, requests),
    st.builds(Abort, request_ids),
    st.builds(Finish, counts, counts),
    shows,
)

logprobs = st.builds(
    TokenLogprobs,
    token_ids,
    st.lists(st.floats(max_value=0, allow_nan=False), max_size=5),
    st.lists(st.integers(1, MAX_INT), max_size=5),
)
candidates = st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0, allow_nan=False), st.integers(1, 2**31 - 1))
positions = st.lists(candidates, min_size=1, max_size=5).map(lambda found: tuple(map(list, zip(*found, strict=True))))
tables = st.lists(positions, max_size=3).map(LogprobTable.of)
deltas = st.builds(
    SequenceDelta,
    request_id=counts,
    index=counts,
    token_ids=token_ids,
    logprobs=st.none() | st.lists(logprobs, max_size=2),
    prompt_logprobs=st.none() | tables,
    finish_reason=st.sampled_from([None, "stop", "length", "repetition", "abort"]),
    stop_reason=st.none() | counts | st.just("repetition_detected"),
    cumulative_logprob=st.none() | st.floats(allow_nan=False),
)
blocks_by_label = st.dictionaries(texts, counts, max_size=3)
kv_stats = st.builds(
    KVStats,
    *[counts] * 8,
    ref_counts=blocks_by_label,
    blocks_by_owner=st.none() | blocks_by_label,
    preemptions=blocks_by_label,
    swap_s=st.floats(0, 1e9),
)
tiers = st.sampled_from(["kv", "swap"])
owners = st.lists(st.builds(BlockOwner, counts, counts, counts), max_size=2)
entries = st.builds(BlockEntry, counts, st.sampled_from(["free", "cached", "used"]), tiers, counts, owners)
holders = st.builds(BlockHolder, counts, st.sampled_from(["sequence", "pin", "lease"]), counts, counts, counts, texts)
spans = st.lists(counts, max_size=3)
overviews = st.builds(BlockOverview, counts, spans, spans, st.lists(st.none() | counts, max_size=3))
maps = st.builds(
    BlockMap, counts, kv_stats, st.lists(entries, max_size=3), st.lists(holders, max_size=3),
    overview=overviews,
)
pins = st.lists(request_ids, max_size=3).map(tuple)
waits = st.none() | st.sampled_from(WAIT_REASONS)
states = st.builds(EngineState, counts, counts, counts, st.none() | kv_stats, pins, counts, counts, waits)
admissions = st.builds(Admission, counts, counts, counts, st.lists(counts, max_size=5).map(tuple), counts, counts)
reports = st.one_of(
    st.builds(Located, texts),
    st.builds(
        Ready,
        limits=st.builds(AdmissionLimits, counts, counts, counts, counts),
        max_num_batched_tokens=counts,
        vocab_size=counts,
        eos_token_ids=st.frozensets(counts, max_size=3),
        dtype=texts,
        device=texts,
        num_parameters=counts,
        weights_bytes=counts,
        kv_bytes_per_token=counts,
    ),
    st.builds(Failed, texts, texts),
    st.builds(
        Stepped,
        seconds,
        counts,
        st.lists(admissions, max_size=3),
        st.lists(deltas, max_size=3),
        states,
        st.lists(counts, max_size=3),
    ),
    st.builds(Idle, states),
    st.builds(RequestRefused, request_ids, texts, st.none() | texts, st.none() | texts),
    st.builds(BlocksReply, shows, maps),
)


def plain(command: Command) -> object:
    """Return a command as something that can be compared: requests are only equal to themselves."""
    if isinstance(command, AddRequest):
        return {name: getattr(command.request, name) for name in Request.__slots__}
    return command


def body_of(message: Command | Report) -> bytes:
    stream = io.BytesIO(frame(message))
    body = read_frame(stream)
    assert body is not None
    assert stream.read() == b""
    return body


@given(commands)
def test_commands_arrive_as_they_were_sent(command: Command) -> None:
    assert plain(decode_command(body_of(command))) == plain(command)


@given(requests)
def test_request_arrives_without_what_is_for_texts_alone(request: Request) -> None:
    arrived = decode_command(body_of(add_message(request)))
    plain_text = SamplingParams()
    of_texts = {name: getattr(plain_text, name) for name in OF_TEXTS}
    assert plain(arrived) == plain(AddRequest(replace(request, params=replace(request.params, **of_texts))))


def test_words_of_a_request_are_not_sent() -> None:
    own = SamplingParams(stop=["the end"], bad_words=["a word"], skip_special_tokens=False)
    sent = body_of(add_message(Request(1, pack_tokens([2]), own, 3, 4)))
    assert not [word for word in (b"the end", b"a word", b"stop", b"skip_special", b"top_p") if word in sent]


@given(reports)
def test_reports_arrive_as_they_were_sent(report: Report) -> None:
    assert decode_report(body_of(report)) == report


def test_prompt_arrives_packed_and_is_shared_by_its_sequences() -> None:
    """A list of a queued prompt's tokens is walked by every garbage collection: 64 prompts of 100,000 cost 22 ms."""
    prompt = pack_tokens([*range(1000), 2**31 - 1])
    arrived = decode_command(body_of(AddRequest(Request(1, prompt, SamplingParams(n=2, max_tokens=4), 3, 4))))
    assert isinstance(arrived, AddRequest)
    request = arrived.request
    assert (request.prompt_token_ids, request.num_queued_tokens) == (prompt, 2002)
    assert gc.get_referents(request.prompt_token_ids) == [array], "no integer"
    scheduler = Scheduler(SchedulerConfig(2, 2048, 2048), make_cache(CacheConfig(num_blocks=256)))
    scheduler.add(request)
    assert all(sequence.token_ids.prompt is request.prompt_token_ids for sequence in request.live)


@given(params)
def test_parameters_keep_their_types(own: SamplingParams) -> None:
    """What is hashed, shared or compared with `is` inside the engine must not become a list or an integer."""
    request = Request(1, pack_tokens([2]), own, 3, 4)
    arrived = decode_command(body_of(add_message(request)))
    assert isinstance(arrived, AddRequest)
    for name in set(SamplingParams.__slots__) - OF_TEXTS:
        assert type(getattr(arrived.request.params, name)) is type(getattr(own, name)), name


@pytest.mark.parametrize("value", [-math.inf, -0.0, 5e-324, -1.0000000000000002])
def test_logprobs_arrive_bit_for_bit(value: float) -> None:
    delta = SequenceDelta(1, 0, [2], [TokenLogprobs([2], [value], [1])])
    report = decode_report(body_of(Stepped(0.0, 1, [], [delta], EngineState(1, 0, 0))))
    assert isinstance(report, Stepped)
    assert report.deltas[0].logprobs is not None
    assert report.deltas[0].logprobs[0].logprobs[0].hex() == value.hex()


@pytest.mark.parametrize("num_bytes", [0, 1, LENGTH_BYTES, LENGTH_BYTES + 1, -1])
def test_part_of_a_frame_is_the_end_of_the_stream(num_bytes: int) -> None:
    assert read_frame(io.BytesIO(frame(Abort(1))[:num_bytes])) is None


def _sent(error: Exception) -> EngineError:
    return error_from(failed(error))


@pytest.mark.parametrize("kind", [ConfigError, ModelError, NotInstalledError])
def test_what_a_user_can_mend_keeps_its_type_and_text(kind: type[EngineError]) -> None:
    error = _sent(kind("block_size must be 16"))
    assert type(error) is kind
    assert str(error) == "block_size must be 16"


def test_kinds_of_what_a_user_can_mend_count_as_it() -> None:
    class NoWeightsError(ModelError):
        """A ModelError in particular."""

    assert type(_sent(NoWeightsError("no weights"))) is ModelError


def test_every_other_error_is_a_fault_of_the_engine() -> None:
    message = failed(KeyError("row"))
    assert message == Failed(FAULT, "KeyError: 'row'")
    assert type(error_from(message)) is EngineDeadError


@pytest.mark.parametrize("text", ["x" * 1_000_000, "/models/caf\udce9"], ids=["long", "a file's name"])
def test_any_error_can_be_sent(text: str) -> None:
    arrived = decode_report(body_of(failed(ModelError(text))))
    assert isinstance(arrived, Failed)
    assert arrived.message.startswith(text[:10])
    assert len(arrived.message) <= MAX_FAILURE_CHARS
