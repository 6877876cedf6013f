"""The address that the server listens on."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.server.http.sockets import bind, bind_path, listen, port_of, remove_path, url_of

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """Return a port with a listener."""
    with bind(HOST, 0) as listener:
        listen(listener, HOST)
        yield port_of(listener)


def test_port_zero_takes_a_free_one() -> None:
    with bind(HOST, 0) as one, bind(HOST, 0) as other:
        assert port_of(one) != port_of(other) != 0
        assert url_of(one, HOST) == f"http://127.0.0.1:{port_of(one)}"


def test_taken_port_is_told_with_one_that_is_free(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"port {taken} of host {HOST} is in use") as refused:
        bind(HOST, taken)
    assert "--port 0" in str(refused.value)
    free = int(str(refused.value).partition("--port ")[2].split()[0])
    with bind(HOST, free) as listener:
        listen(listener, HOST)


def test_port_that_another_server_takes_first_is_told() -> None:
    with bind(HOST, 0) as one, bind(HOST, port_of(one)) as other:
        listen(one, HOST)
        with pytest.raises(ConfigError, match="is in use"):
            listen(other, HOST)


def test_nothing_answers_before_listening() -> None:
    with bind(HOST, 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port_of(listener)))


@pytest.mark.parametrize(("host", "message"), [("203.0.113.7", "no address of this"), ("no such host", "known")])
def test_host_that_is_not_here_is_told(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind(host, 0)


def test_ipv6_host_stands_in_brackets() -> None:
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 on this machine")
    with listener:
        assert url_of(listener, "::1") == f"http://[::1]:{port_of(listener)}"


def test_localhost_is_reached_by_ipv4() -> None:
    with bind("localhost", 0) as listener:
        assert listener.family is socket.AF_INET
        assert url_of(listener, "localhost").startswith("http://localhost:")


def test_unix_socket_is_served_replaced_and_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "quire.sock")
    with bind_path(path) as listener:
        listen(listener, HOST)
        assert url_of(listener, HOST) == f"unix:{path}"
        with pytest.raises(ConfigError, match=f"cannot listen on uds {path}: it is in use"):
            bind_path(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    with bind_path(path):                               # left over by a server that has ended
        remove_path(path)
    assert not Path(path).exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="it is in use"):
        bind_path(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot listen on uds"):
        bind_path(str(tmp_path / "no" / "quire.sock"))
