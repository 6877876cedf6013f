"""A small soak of three engines, of which one is killed again and again: every request ends exactly once."""

import asyncio

import pytest

import fleet_soak
from support.server import running_server, wait_until

NUM_REQUESTS, NUM_KILLS = 240, 3


def test_every_request_ends_exactly_once_while_engines_die() -> None:
    with running_server(*fleet_soak.FLAGS) as server:

        async def kill(tally: fleet_soak.Tally) -> None:
            while tally.num_ended < NUM_REQUESTS // (NUM_KILLS + 2):
                await asyncio.sleep(0.01)
            assert fleet_soak.kill_one(server, tally)   # at once: a thread might come after the last request
            for number in range(2, NUM_KILLS + 1):
                await fleet_soak.until(lambda: tally.num_ended >= number * NUM_REQUESTS // (NUM_KILLS + 2))  # noqa: B023
                await fleet_soak.until(lambda: fleet_soak.kill_one(server, tally))

        tally = asyncio.run(fleet_soak.run_soak(server, NUM_REQUESTS, kill, lambda _: None))
        pids = server.child_pids()
        assert tally.wrong == []
        assert tally.num_ended == NUM_REQUESTS
        assert tally.num_answered > NUM_REQUESTS / 2
        assert tally.num_kills > 0
        assert server.stop() == 0
        wait_until(lambda: not any(pid in server.child_pids() for pid in pids))


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ('data: {"choices":[{"index":0,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n', "answered"),
        (': keepalive\n\ndata: {"choices":[{"index":0,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n', "answered"),
        ('data: {"error":{"code":"engine_unhealthy"}}\n\ndata: [DONE]\n\n', "lost"),
    ],
)
def test_soak_knows_both_ends(text: str, ended: str) -> None:
    assert fleet_soak.end_of_stream(text, 1) == ended


@pytest.mark.parametrize(
    "text",
    [
        'data: {"choices":[{"index":0,"finish_reason":"length"}]}\n\n',
        'data: {"choices":[{"index":0,"finish_reason":null}]}\n\ndata: [DONE]\n\n',
        'data: [DONE]\n\ndata: {"choices":[{"index":0,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n',
        'data: {"error":{"code":"request_failed"}}\n\ndata: [DONE]\n\n',
        'data: {"error":{"code":"engine_unhealthy"}}\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n',
    ],
)
def test_soak_notices_what_is_no_end(text: str) -> None:
    assert fleet_soak.end_of_stream(text, 1) not in ("answered", "lost")
