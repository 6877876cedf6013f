"""Bytes of all bodies together, and which body makes room for another."""

import random
import socket

import pytest

from quire.server.limits.memory import BodyMemory, BodyMemoryFullError, BufferedBody
from quire.server.options import ServerOptions
from support.http_app import ask, connect, make_app, parse, read_all, serving

MAX_BYTES = 4096                 # small bodies: up to 64 bytes each, 1,024 in all
NUM_LARGE = MAX_BYTES * 3 // 4


def held(bodies: BodyMemory, client_id: str, num_bytes: int, dropped: list[str] | None = None) -> BufferedBody:
    body = BufferedBody(bodies, client_id, lambda: None if dropped is None else dropped.append(client_id))
    body.grow(num_bytes)
    return body


def test_bytes_are_given_back() -> None:
    bodies = BodyMemory(MAX_BYTES)
    small, large = held(bodies, "a", 64), held(bodies, "a", 65)
    assert (bodies.num_bytes, bodies.small.num_bytes, bodies.large.num_bytes) == (129, 64, 65)
    small.grow(1)
    assert (bodies.small.num_bytes, bodies.large.num_bytes) == (0, 130)
    for body in (small, small, large):
        body.release()
    assert bodies.num_bytes == 0
    bodies.check()


def test_the_client_that_holds_the_most_makes_room_with_the_body_that_waits_longest() -> None:
    bodies, dropped = BodyMemory(MAX_BYTES), list[str]()
    held(bodies, "b", 1000, dropped)
    stalled, growing = held(bodies, "a", 700, dropped), held(bodies, "a", 500, dropped)
    growing.grow(100)
    newcomer = held(bodies, "c", 800)
    assert dropped == ["a"]
    assert (stalled.is_dropped, growing.is_dropped, newcomer.is_dropped) == (True, False, False)
    with pytest.raises(BodyMemoryFullError):
        stalled.grow(1)
    bodies.check()


def test_a_complete_body_is_never_dropped() -> None:
    bodies, dropped = BodyMemory(MAX_BYTES), list[str]()
    for client in "ab":
        held(bodies, client, NUM_LARGE // 2, dropped).is_complete = True
    newcomer = BufferedBody(bodies, "c", lambda: None)
    with pytest.raises(BodyMemoryFullError):
        newcomer.grow(100)
    newcomer.release()
    assert not dropped
    bodies.check()


def test_one_client_holds_half_at_most() -> None:
    bodies = BodyMemory(MAX_BYTES)
    held(bodies, "a", NUM_LARGE // 2)
    more = BufferedBody(bodies, "a", lambda: None)
    with pytest.raises(BodyMemoryFullError):
        more.grow(65)
    more.release()
    held(bodies, "b", NUM_LARGE // 2)


def test_small_bodies_have_room_beside_any_number_of_large_ones() -> None:
    bodies = BodyMemory(MAX_BYTES)
    for number in range(3):
        held(bodies, f"hostile {number}", NUM_LARGE // 3).is_complete = True
    for number in range(16):
        held(bodies, f"honest {number}", 64)
    assert (bodies.large.num_bytes, bodies.small.num_bytes) == (NUM_LARGE, 16 * 64)
    bodies.check()


def test_bound_holds_whatever_comes() -> None:
    rng = random.Random(0)
    bodies, open_ = BodyMemory(MAX_BYTES), list[BufferedBody]()
    for _ in range(5000):
        body = rng.choice(open_) if open_ and rng.random() < 0.7 else None
        if body is None:
            body = BufferedBody(bodies, rng.choice("abcdefgh"), lambda: None)
            open_.append(body)
        action = rng.random()
        try:
            if action < 0.7 and not body.is_complete:
                body.grow(rng.choice([1, 10, 64, 300]))
            elif action < 0.8:
                body.is_complete = True
            elif action < 0.9:
                raise BodyMemoryFullError
        except BodyMemoryFullError:
            body.release()
            open_.remove(body)
        bodies.check()


def test_unfinished_bodies_are_bounded_in_sum_and_honest_ones_are_answered() -> None:
    """Each connection is a client here. A body that is dropped is told so, and its connection ends."""
    app = make_app(max_body_bytes=1000, max_total_body_bytes=MAX_BYTES)
    bodies = app.state.service.admission.bodies
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    hostile: list[socket.socket] = []
    with serving(app) as port:
        for _ in range(10):
            hostile.append(connect(port))
            hostile[-1].sendall(head + b" " * 900)
        answers = [parse(read_all(connection)) for connection in hostile[3:]]  # three of 900 bytes have room
        assert {(answer.status, answer.error["code"]) for answer in answers} == {(429, "server_overloaded")}
        assert all("max_total_body_bytes" in answer.error["message"] for answer in answers)
        assert bodies.num_bytes == 2700
        with connect(port) as honest:
            honest.sendall(head.replace(b"1000", b"800") + b"1" + b" " * 400)
            dropped = parse(read_all(hostile[0]))
            honest.sendall(b" " * 399)
            assert honest.recv(65536).startswith(b"HTTP/1.1 200")
        assert (dropped.status, dropped.error["code"]) == (429, "server_overloaded")
        assert int(dropped.headers["retry-after"]) >= 1
        for connection in hostile:
            connection.close()


def test_no_bytes_are_held_after_the_answer() -> None:
    app = make_app()
    assert ask(app, "POST", "/echo", content=b"1" * 100_000).status_code == 200
    assert app.state.service.admission.bodies.num_bytes == 0
    assert ask(app, "POST", "/v1/completions", content=b"no JSON").status_code == 400
    assert app.state.service.admission.bodies.num_bytes == 0


def test_bound_must_have_room_for_bodies() -> None:
    ServerOptions(max_body_bytes=1 << 20, max_total_body_bytes=4 << 20)
    with pytest.raises(ValueError, match="max_total_body_bytes must be at least 4 times max_body_bytes"):
        ServerOptions(max_body_bytes=(1 << 20) + 1, max_total_body_bytes=4 << 20)
