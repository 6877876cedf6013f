"""The routing rules, and what a router learns from the reports of engines."""

import random
from typing import Any

import pytest

from quire.core.deltas import Admission, SequenceDelta
from quire.core.errors import ConfigError
from quire.core.pooling import Scope
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.fleet.router import CACHED_TOKEN_WEIGHT, Router

BLOCK_SIZE = 4


class Requests:
    """Requests with numbers of their own."""

    def __init__(self) -> None:
        self._num = 0

    def __call__(self, tokens: list[int], n: int = 1, salt: str | None = None) -> Request:
        self._num += 1
        params = SamplingParams(n=n, max_tokens=8)
        return Request(self._num, pack_tokens(tokens), params, seed=0, max_tokens=8, scope=Scope(salt=salt))


@pytest.fixture
def request_of() -> Requests:
    return Requests()


def make_router(num_engines: int = 2, num_blocks: int = 64, max_num_seqs: int = 4000, **settings: Any) -> Router:  # noqa: ANN401
    return Router([num_blocks] * num_engines, BLOCK_SIZE, max_num_seqs, **settings)


def run_whole(router: Router, request: Request, engine: int, output: list[int], num_cached: int = 0) -> None:
    """Report that an engine has admitted, computed and finished a request in one step."""
    number, n = request.request_id, request.params.n
    deltas = [SequenceDelta(number, index, output, finish_reason="length") for index in range(n)]
    router.on_step(engine, [Admission(request.request_id, 0, num_cached)], deltas, 0)


def test_requests_without_a_common_prefix_are_spread_by_pending_tokens(request_of: Requests) -> None:
    router = make_router()
    assert router.route(request_of([1] * 40)) == 0
    assert router.route(request_of([2] * 10)) == 1
    assert router.route(request_of([3] * 10)) == 1
    assert router.route(request_of([4] * 30)) == 1       # 20 against 40
    assert router.route(request_of([5] * 5)) == 0
    assert router.num_pending == [45, 50]


def test_cached_prefix_draws_a_request_until_the_engine_has_too_much_to_do(request_of: Requests) -> None:
    router, prefix = make_router(), list(range(40))
    first = request_of(prefix)
    assert router.route(first) == 0
    run_whole(router, first, 0, [7])
    num_drawn = 0
    while router.route(request_of([*prefix, 100 + num_drawn])) == 0:
        num_drawn += 1
        assert num_drawn < 1000, "it piles up"
        router.route(request_of([1000 + num_drawn]), engines=[0])     # other work
    assert 1 < num_drawn <= CACHED_TOKEN_WEIGHT * len(prefix)


def test_engine_with_free_rows_comes_before_one_whose_cache_has_the_prefix(request_of: Requests) -> None:
    router, prefix = make_router(3, num_blocks=4000, max_num_seqs=4), list(range(400))
    routed = [router.route(request_of([*prefix, 1000 + number])) for number in range(12)]
    assert [routed.count(engine) for engine in range(3)] == [4, 4, 4]
    assert routed[:4] == [0] * 4, "as long as there is room, where the prefix is"
    more = [router.route(request_of([*prefix, 2000 + number])) for number in range(24)]
    assert [more.count(engine) for engine in range(3)] == [8, 8, 8], "where all would wait, queues are as long"
    router.check()


@pytest.mark.parametrize("reason", ["max_num_seqs", "kv_blocks", "swapped_first"])
def test_engine_with_room_comes_before_one_where_requests_wait_for_it(request_of: Requests, reason: Any) -> None:  # noqa: ANN401
    router, prefix = make_router(num_blocks=4000), list(range(400))
    first = request_of(prefix)
    assert router.route(first) == 0
    run_whole(router, first, 0, [7])
    router.on_step(0, [], [], 0, waits_for=reason)
    assert router.route(request_of([*prefix, 500])) == 1
    router.on_step(0, [], [], 0)                         # room again
    router.on_step(1, [], [], 0, waits_for=reason)
    assert router.route(request_of([*prefix, 501])) == 0


def test_blocks_in_use_are_no_room(request_of: Requests) -> None:
    router, prefix = make_router(num_blocks=64), list(range(100))
    first = request_of(prefix)
    assert router.route(first) == 0
    run_whole(router, first, 0, [7])
    router.on_step(0, [], [], 0, num_used_blocks=60)
    assert router.route(request_of([*prefix, *range(200, 216)])) == 1
    assert router.route(request_of([*prefix, 300])) == 0, "its own tokens fit"


def test_output_is_found_by_the_next_turn(request_of: Requests) -> None:
    router = make_router()
    router.route(request_of([9] * 100))                 # engine 0 is busy
    first = request_of([1] * 8)
    assert router.route(first) == 1
    run_whole(router, first, 1, [2] * 9)
    router.route(request_of([5] * 120))                 # and now the other one, more
    assert router.route(request_of([1] * 8 + [2] * 8 + [3] * 4)) == 1


def test_scopes_share_no_prefix(request_of: Requests) -> None:
    router, prompt = make_router(), [1] * 16
    first = request_of(prompt, salt="a")
    router.route(first)
    run_whole(router, first, 0, [1])
    assert router.route(request_of(prompt, salt="b")) == 1
    assert router.route(request_of(prompt, salt="a")) == 0


def test_admission_corrects_what_was_expected_to_be_cached(request_of: Requests) -> None:
    router = make_router(1)
    first, second = request_of([1] * 16), request_of([1] * 16)
    router.route(first)
    run_whole(router, first, 0, [1])
    router.route(second)
    assert router.num_pending == [1]                     # the last token is always computed
    router.on_step(0, [Admission(second.request_id, 0, 4)], [], 0)
    assert router.num_pending == [12]
    router.on_step(0, [Admission(second.request_id, 1, 0)], [], 0)  # preempted and back: not its first admission
    assert router.num_pending == [12]
    router.on_step(0, [], [SequenceDelta(second.request_id, 0, [7])], 0)
    assert router.num_pending == [0]


def test_evictions_leave_the_index(request_of: Requests) -> None:
    router = make_router()
    first = request_of([1] * 16)
    router.route(first)
    run_whole(router, first, 0, [1])
    router.on_step(0, [], [], 4)
    other = request_of([2] * 3)
    assert router.route(other) == 1                      # fewer routed tokens so far
    run_whole(router, other, 1, [1])
    assert router.route(request_of([1] * 16)) == 1


def test_all_branches_must_end(request_of: Requests) -> None:
    router = make_router(1)
    request = request_of([1] * 4, n=2)
    router.route(request)
    router.on_step(0, [], [SequenceDelta(request.request_id, 1, [1], finish_reason="stop")], 0)
    assert len(router._engines[0].requests) == 1
    router.on_step(0, [], [SequenceDelta(request.request_id, 0, [1], finish_reason="stop")], 0)
    assert len(router._engines[0].requests) == 0


def test_failed_request_has_ended(request_of: Requests) -> None:
    router = make_router(1)
    request = request_of([1] * 4, n=2)
    router.route(request)
    router.on_step(0, [], [SequenceDelta(request.request_id, 0, [], error="it failed")], 0)
    assert router.num_pending == [0]
    router.check()


def test_dead_engine_loses_its_work_and_its_cache_and_gets_no_run_of_ties(request_of: Requests) -> None:
    router = make_router()
    for token in range(8):
        router.route(request_of([token] * 8))
    router.replace(0)
    assert router.num_pending == [0, 32]
    router.check()
    router.on_step(0, [Admission(1, 0, 0)], [SequenceDelta(1, 0, [1])], 0)   # a late report of a lost request
    router.check()


def test_round_robin_takes_turns_among_those_that_may_be_chosen(request_of: Requests) -> None:
    router = make_router(3, routing="round-robin")
    assert [router.route(request_of([1] * 8)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert {router.route(request_of([1] * 8), engines=[0, 2]) for _ in range(4)} == {0, 2}


def test_affinity_follows_the_longest_prefix_whatever_waits_there(request_of: Requests) -> None:
    router = make_router(routing="affinity")
    assert router.route(request_of([1] * 8)) == 0
    for token in range(50):
        assert router.route(request_of([1] * 8 + [token] * 8)) == 0
    assert router.route(request_of([2] * 8)) == 1


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="routing must be one of prefix, round-robin, affinity, got 'random'"):
        make_router(routing="random")


@pytest.mark.parametrize("seed", range(4))
def test_random_reports_keep_the_counts_right(seed: int, request_of: Requests) -> None:
    generator, router = random.Random(seed), make_router(3, num_blocks=16)
    open_requests: dict[int, Request] = {}
    evicted = [0, 0, 0]
    for _ in range(200):
        tokens = [generator.randrange(3) for _ in range(generator.randrange(1, 30))]
        request = request_of(tokens, n=generator.choice([1, 1, 2]))
        engine = router.route(request)
        open_requests[request.request_id] = request
        match generator.randrange(4):
            case 0:
                router.forget(generator.choice(list(open_requests)))
            case 1:
                evicted[engine] += generator.randrange(5)
                router.on_step(engine, [Admission(request.request_id, 0, 0)], [], evicted[engine])
            case 2:
                run_whole(router, request, engine, [1, 2, 3])
            case 3 if generator.random() < 0.1:
                router.replace(engine)
                evicted[engine] = 0
        router.check()
