"""What is too long, too slow or not HTTP, on real sockets."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from quire.server.http import protocol, sockets
from quire.server.options import DEFAULT_LIMITS
from support.http_app import (
    SOCKET_LIMIT_S,
    RawResponse,
    connect,
    exchange,
    make_app,
    parse,
    read_all,
    read_one,
    serving,
)
from support.server import wait_until

MAX_BODY_BYTES = 1000
HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MAX_PIPELINED = DEFAULT_LIMITS.max_pipelined_requests
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def slow_app() -> FastAPI:
    """Return an application with /slow, which answers in two parts; the second comes when /go was asked."""
    app, go = make_app(max_body_bytes=MAX_BODY_BYTES), asyncio.Event()

    @app.get("/slow")
    async def slow() -> StreamingResponse:
        async def parts() -> object:
            yield b"first"
            await go.wait()
            yield b"second"

        return StreamingResponse(parts())

    @app.get("/go")
    async def release() -> None:
        go.set()

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def parts() -> object:
            try:
                while True:
                    yield b"x" * 65536
                    await asyncio.sleep(0)
            finally:
                app.state.num_ended += 1

        return StreamingResponse(parts())

    @app.get("/quiet")
    async def quiet(request: Request) -> None:
        app.state.num_begun += 1
        while (await request.receive())["type"] != "http.disconnect":
            pass
        app.state.num_ended += 1

    app.state.num_begun = app.state.num_ended = 0
    return app


@pytest.fixture(autouse=True)
def _refused_clients_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LINGER_S", 3600.0)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(slow_app()) as port:
        yield port


def asked(port: int, *pieces: bytes) -> RawResponse:
    return parse(exchange(port, *pieces))


def assert_refused(response: RawResponse, status: int, code: str | None) -> None:
    assert (response.status, response.error["code"]) == (status, code)
    assert response.error["type"] == "invalid_request_error"
    assert response.headers["connection"] == "close"
    assert response.headers["content-type"] == "application/json"


# --- malformed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /version HTTP/7.3\r\n\r\n",
        b"GET /version HTTP/2.0\r\n\r\n",
        b"GET /version\r\n\r\n",
        b"GET /no-such-path\r\n\r\n",
        b"POST /echo\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"BREW /version HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET \xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /version HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /version HTTP/1.1\r\nname : value\r\n\r\n",
        b"GET /version HTTP/1.1\r\nname: a\x00b\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /echo HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_not_http_is_told_so(request_bytes: bytes, port: int) -> None:
    assert_refused(asked(port, request_bytes), 400, None)


def test_bad_piece_of_a_body_is_answered_once(port: int) -> None:
    response = asked(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", b"zz\r\n")
    assert_refused(response, 400, None)


@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"\x00\x00\x00\r\n\r\n", 400),
        (LAST[:-2] + b"no colon\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n", 400),
        (HEAD + b"Content-Length: 999999\r\n\r\n" + b"x" * 99999, 413),
    ],
    ids=["bytes", "header", "body", "long body"],
)
def test_garbage_behind_a_request_is_told_after_its_answer(garbage: bytes, status: int) -> None:
    with serving(slow_app()) as port, connect(port) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while b"first" not in received:
            received += connection.recv(65536)
        connection.sendall(garbage)
        assert exchange(port, b"GET /go HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        received += read_all(connection)
    assert received.startswith(b"HTTP/1.1 200 ")
    first, error = received.split(b"0\r\n\r\n", 1)
    assert b"second" in first
    assert parse(error).status == status


# --- too large --------------------------------------------------------------------------------------------------------


def header(num_bytes: int, name: bytes = b"X-Filler") -> bytes:
    return name + b": " + b"x" * num_bytes + b"\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * DEFAULT_LIMITS.max_url_bytes + b" HTTP/1.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\n" + header(DEFAULT_LIMITS.max_header_bytes) + b"\r\n",
        b"GET /version HTTP/1.1\r\n" + header(DEFAULT_LIMITS.max_header_bytes // 3) * 3 + b"\r\n",
        b"GET /version HTTP/1.1\r\n" + header(1) * (DEFAULT_LIMITS.max_headers + 1) + b"\r\n",
        b"GET /version HTTP/1.1\r\n" + header(1 << 20) + b"\r\n",
    ],
    ids=["url", "one header", "all headers", "count", "a megabyte"],
)
def test_head_that_is_too_large_is_refused(head: bytes, port: int) -> None:
    assert_refused(asked(port, head), 431, "headers_too_large")


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /",
        b"GET /version HTTP/1.1\r\nX-Filler: ",
        b"GET /version HTTP/1.1\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;extension=",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Trailer: ",
    ],
    ids=["url", "value", "name", "chunk extension", "trailer"],
)
def test_endless_head_is_refused_before_it_ends(beginning: bytes, port: int) -> None:
    with connect(port) as connection:
        connection.sendall(beginning)
        connection.sendall(b"x" * (1 << 20))  # more than one read takes
        assert_refused(parse(read_all(connection)), 431, "headers_too_large")


def test_largest_head_is_taken(port: int) -> None:
    filler = header(DEFAULT_LIMITS.max_header_bytes // 2)
    small = header(1) * (DEFAULT_LIMITS.max_headers - 3)
    request = LAST.removesuffix(b"\r\n") + filler + small + b"\r\n"
    assert asked(port, request).status == 200


def test_large_body_after_a_small_head_is_no_large_head(port: int) -> None:
    body = b'"' + b"x" * (MAX_BODY_BYTES - 2) + b'"'
    pieces = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body)
    response = asked(port, HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
    assert (response.status, response.body) == (200, body)


def test_trailer_is_no_header(port: int) -> None:
    trailer = b"Authorization: Bearer x\r\n"
    chunks = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + trailer + b"\r\n"
    assert asked(port, HEAD + chunks).body == b"{}"


def test_connection_goes_on_after_a_body_that_was_too_long(port: int) -> None:
    body = b" " * (1 << 20)
    with connect(port) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + LAST)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 413 ")
    assert received.count(b"HTTP/1.1 200 ") == 1


def test_too_long_body_is_refused_before_it_is_sent(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(HEAD + b"Content-Length: 999999999\r\n\r\n")
        received = b""
        while b"request_too_large" not in received:
            received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 413 ")


def test_client_that_asks_before_it_sends_is_told_in_time(port: int) -> None:
    received = exchange(port, HEAD + b"Content-Length: 999999\r\nExpect: 100-continue\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("blanks", [b"", b" ", b" \t "], ids=["plain", "blank", "tab"])
def test_client_that_asks_before_it_sends_may_go_on(port: int, blanks: bytes) -> None:
    """Blanks behind a value are no part of it (RFC 9110, section 5.5); httptools 0.9.0 keeps them."""
    line, *fields = HEAD.split(b"\r\n")[:-1]
    fields += [b"Connection: close", b"Content-Length: 2", b"Expect: 100-continue"]
    with connect(port) as connection:
        connection.sendall(b"\r\n".join([line, *(field + blanks for field in fields), b"", b""]))
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        assert received == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        assert parse(read_all(connection)).body == b"{}"


def test_requests_that_wait_on_one_connection_are_few(port: int) -> None:
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    assert exchange(port, one * MAX_PIPELINED + LAST).count(b"HTTP/1.1 200 ") == MAX_PIPELINED + 1
    received = exchange(port, one * (MAX_PIPELINED * 2) + LAST)
    assert received.count(b"HTTP/1.1 200 ") == MAX_PIPELINED + 1
    assert_refused(parse(received[received.index(b"HTTP/1.1 400 ") :]), 400, None)


def test_connections_that_are_too_many_are_turned_away() -> None:
    with serving(slow_app(), max_connections=1) as port, connect(port) as first:
        first.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_one(first).startswith(b"HTTP/1.1 200 ")
        response = parse(exchange(port))
        assert (response.status, response.error["code"]) == (429, "server_overloaded")
        assert int(response.headers["retry-after"]) >= 1
        first.sendall(LAST)
        assert read_all(first).startswith(b"HTTP/1.1 200 ")


def status_of(connection: socket.socket) -> int:
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    return int(read_one(connection).split()[1])


def test_connections_that_were_refused_take_no_place() -> None:
    """They linger for an hour here; whoever was admitted has left."""
    with serving(slow_app(), max_connections=2) as port, ExitStack() as refused:
        with connect(port) as first, connect(port) as second:
            assert (status_of(first), status_of(second)) == (200, 200)
            for _ in range(5):
                assert parse(read_all(refused.enter_context(connect(port)))).status == 429
            second.sendall(b"nonsense\r\n\r\n")
            assert parse(read_all(second)).status == 400
            with connect(port) as third:
                assert status_of(third) == 200, "the second does not count any more"

        def both_are_served() -> bool:
            with connect(port) as one, connect(port) as other:
                return (status_of(one), status_of(other)) == (200, 200)

        wait_until(both_are_served)


def test_refused_connections_that_linger_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_LINGERING", 2)
    with serving(slow_app(), max_connections=1) as port, connect(port) as first, ExitStack() as refused:
        assert status_of(first) == 200
        lingering = [refused.enter_context(connect(port)) for _ in range(5)]
        assert [parse(read_all(each)).status for each in lingering] == [429] * 5
        wait_until(lambda: [is_open(each) for each in lingering] == [False, False, False, True, True])


def is_open(connection: socket.socket) -> bool:
    """Return whether the other side still takes what is sent; a closed one resets the connection."""
    with suppress(ConnectionError):
        connection.sendall(b"x")
        return True
    return False


# --- too slow ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[protocol.Protocol]:
    """Return the connections whose time for a request has run out, in that order.

    It begins anew until the first byte has come: else a test that is slow to send would be taken for a slow client.
    """
    note_late_arrival, late = protocol.Protocol._on_receive_timeout, list[protocol.Protocol]()

    def note(connection: protocol.Protocol) -> None:
        if connection._part == "head" or connection.cycle is not None:
            late.append(connection)
            note_late_arrival(connection)
        else:
            connection._cancel_receive_timer()
            connection._start_receive_timer()

    monkeypatch.setattr(protocol.Protocol, "_on_receive_timeout", note)
    return late


@pytest.fixture(scope="module")
def hasty_port() -> Iterator[int]:
    with serving(slow_app(), receive_timeout=0.05, send_timeout=0.05, idle_timeout=0.1) as port:
        yield port


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("head", [b"G", b"GET /version HTTP/1.1\r\n", b"GET /version HTTP/1.1\r\nHost: "])
def test_head_that_does_not_come_is_a_timeout(head: bytes, hasty_port: int) -> None:
    assert_refused(asked(hasty_port, head), 408, "request_timeout")


@pytest.mark.usefixtures("late")
def test_second_head_that_does_not_come_is_a_timeout_too(hasty_port: int) -> None:
    received = exchange(hasty_port, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /ver")
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in received


def test_connection_on_which_nothing_is_said_is_closed(hasty_port: int) -> None:
    assert exchange(hasty_port) == b""


@pytest.mark.usefixtures("late")
def test_rest_of_a_refused_body_is_not_waited_for_forever(hasty_port: int) -> None:
    received = exchange(hasty_port, HEAD + b"Content-Length: 999999\r\n\r\n{")
    assert received.startswith(b"HTTP/1.1 413 ")
    assert received.count(b"HTTP/1.1") == 1


def test_answer_in_the_making_is_not_cut_by_the_limit(late: list[protocol.Protocol]) -> None:
    with serving(slow_app(), receive_timeout=0.05) as port, connect(port) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\n")
        wait_until(lambda: len(late) >= 2)
        assert exchange(port, b"GET /go HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        assert b"second" in read_all(connection)


def test_idle_connection_is_kept(port: int) -> None:
    with connect(port) as connection:
        for _ in range(3):
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_one(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("late")
def test_connection_without_a_request_is_closed_after_a_while(hasty_port: int) -> None:
    received = exchange(hasty_port, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert received.count(b"HTTP/1.1 200 ") == 1


def test_reader_who_takes_nothing_is_dropped_and_his_answer_ends() -> None:
    app = slow_app()
    with serving(app, send_timeout=0.1) as port, connect(port, receive_buffer=4096) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: app.state.num_ended == 1)
        assert not read_all(connection).endswith(b"0\r\n\r\n"), "the answer is whole"


@pytest.mark.parametrize("rest", [b"", LAST, LAST * 3, HEAD + b"Content-Length: 5\r\n\r\n{"])
@pytest.mark.parametrize("ends", ["closes", "resets"])
def test_client_that_goes_is_missed_whatever_it_has_sent_ahead(rest: bytes, ends: str) -> None:
    """uvicorn stops reading where a request waits behind another, and tells the one that came last of the end."""
    app = slow_app()
    with serving(app) as port:
        with connect(port) as connection:
            connection.sendall(b"GET /quiet HTTP/1.1\r\nHost: x\r\n\r\n" + rest)
            wait_until(lambda: app.state.num_begun == 1)
            if ends == "resets":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_until(lambda: app.state.num_ended == 1)
    assert app.state.num_begun == 1, "a request was begun for a client that had gone"


def test_reader_who_is_slow_but_reads_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """He reads whenever his time is up, and is judged after that, however slow the machine."""
    piece, num_read, num_looks = 16384, 0, 0
    note, is_up = protocol.Protocol._on_send_timeout, threading.Event()

    def look(connection: protocol.Protocol, num_bytes: int, num_read_before: int | None = None) -> None:
        nonlocal num_looks
        if num_read_before is not None and num_read >= num_read_before + piece:
            num_looks += 1
            note(connection, num_bytes)
            return
        is_up.set()
        before = num_read if num_read_before is None else num_read_before
        connection._send_timer = connection.loop.call_later(0.001, look, connection, num_bytes, before)

    monkeypatch.setattr(protocol.Protocol, "_on_send_timeout", look)
    slow = serving(slow_app(), send_timeout=0.05, max_buffered_bytes=1024)
    with slow as port, connect(port, receive_buffer=4096) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        while num_looks < 4:
            assert is_up.wait(SOCKET_LIMIT_S)
            is_up.clear()
            due = num_read + piece
            while num_read < due:
                num_read += len(read := connection.recv(4096))
                assert read


@pytest.mark.parametrize("path", [b"/slow", b"/version"])
def test_client_that_ends_its_side_is_gone(path: bytes, port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert b"second" not in read_all(connection)


def test_stream_of_http_1_0_has_no_chunks_and_ends_with_its_connection() -> None:
    with serving(slow_app()) as port, connect(port) as connection:
        connection.sendall(b"GET /slow HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        received = b""
        while b"first" not in received:
            received += connection.recv(65536)
        exchange(port, b"GET /go HTTP/1.1\r\nConnection: close\r\n\r\n")
        received += read_all(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body == b"firstsecond"


def test_whole_answer_of_http_1_0_has_its_length(port: int) -> None:
    response = asked(port, b"GET /version HTTP/1.0\r\n\r\n")
    assert response.status == 200
    assert int(response.headers["content-length"]) == len(response.body) > 0


def test_upgrade_that_nobody_offers_is_passed_over(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert read_one(connection).startswith(b"HTTP/1.1 200 ")


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("size", [1, 100, 1000])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_of_who_would_rather_speak_http_2_is_read(port: int, size: int, chunked: bool) -> None:
    """As Java's HttpClient and `curl --http2` ask first."""
    framing = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" if chunked else b"Content-Length: 2\r\n\r\n{}"
    asked = (HEAD + UPGRADE + framing) * 2 + LAST
    received = exchange(port, *(asked[at : at + size] for at in range(0, len(asked), size)))
    assert received.count(b"HTTP/1.1 200 ") == 3
    assert received.count(b"\r\n\r\n{}") == 2


def test_tunnel_is_refused(port: int) -> None:
    assert_refused(asked(port, b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n"), 400, None)


def test_head_has_no_body(port: int) -> None:
    received = exchange(port, b"HEAD /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""
