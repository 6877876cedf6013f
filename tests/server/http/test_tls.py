"""TLS: HTTPS with a certificate, certificates of clients, refused requests, and what cannot be used."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire.core.errors import ConfigError
from quire.server.http.sockets import tls_context
from quire.server.options import ServerOptions
from support.http_app import HOST, SOCKET_LIMIT_S, connect, make_app, read_all, serving
from support.server import ServerProcess

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make certificates with")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of a certificate that signs itself, its key, and the same key under a password."""
    folder = tmp_path_factory.mktemp("tls")
    paths = {name: str(folder / f"{name}.pem") for name in ("cert", "key", "locked")}
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=quire", "-addext",
            f"subjectAltName=IP:{HOST}", "-keyout", paths["key"], "-out", paths["cert"])  # fmt: skip
    openssl("rsa", "-aes128", "-passout", "pass:x", "-in", paths["key"], "-out", paths["locked"])
    return paths


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=SOCKET_LIMIT_S)


@contextmanager
def serving_tls(files: dict[str, str], cert_reqs: int = 0, **limits: float) -> Iterator[int]:
    ca = files["cert"] if cert_reqs else None
    options = ServerOptions(
        ssl_certfile=files["cert"], ssl_keyfile=files["key"], ssl_ca_certs=ca, ssl_cert_reqs=cert_reqs
    )
    with serving(make_app(), tls=tls_context(options), **limits) as port:
        yield port


def trusting(files: dict[str, str], *, shows_certificate: bool = False) -> ssl.SSLContext:
    """Return the context of a client that trusts the certificate."""
    context = ssl.create_default_context(cafile=files["cert"])
    if shows_certificate:
        context.load_cert_chain(files["cert"], files["key"])
    return context


def health(files: dict[str, str], port: int, *, shows_certificate: bool = False) -> int:
    context = trusting(files, shows_certificate=shows_certificate)
    return httpx.get(f"https://{HOST}:{port}/health", verify=context, timeout=SOCKET_LIMIT_S).status_code


def test_https_is_answered_and_http_is_not(files: dict[str, str]) -> None:
    with serving_tls(files) as port:
        assert health(files, port) == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{HOST}:{port}/health", timeout=SOCKET_LIMIT_S)
        assert health(files, port) == 200


def test_client_without_a_certificate_is_refused_where_one_is_required(files: dict[str, str]) -> None:
    with serving_tls(files, cert_reqs=2) as port:
        assert health(files, port, shows_certificate=True) == 200
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            health(files, port)


def test_refused_request_gets_its_answer_and_its_connection_ends(files: dict[str, str]) -> None:
    with serving_tls(files, max_headers=2) as port:
        connection = trusting(files).wrap_socket(connect(port), server_hostname=HOST)
        with connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nA: b\r\nB: c\r\n\r\n")
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"max_headers" in answer


def test_handshake_that_does_not_come_ends_its_connection(files: dict[str, str]) -> None:
    with serving_tls(files, receive_timeout=0.2) as port, connect(port) as silent:
        assert silent.recv(1) == b""


def test_handshakes_are_bounded(files: dict[str, str]) -> None:
    with serving_tls(files, max_connections=1) as port, connect(port) as silent:
        with connect(port) as another, pytest.raises((ConnectionError, ssl.SSLError)):
            trusting(files).wrap_socket(another, server_hostname=HOST)
        silent.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ssl_keyfile": "key"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_certfile": "cert"}, "ssl_certfile .*cert.pem' cannot be used"),
        ({"ssl_certfile": "none", "ssl_keyfile": "key"}, "ssl_certfile 'none' with ssl_keyfile .* cannot .*No such"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "locked"}, "must not be encrypted"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ca_certs": "none"}, "ssl_ca_certs 'none' cannot be used"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_cert_reqs": 2}, "ssl_cert_reqs 2 needs ssl_ca_certs"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_cert_reqs": 3}, "ssl_cert_reqs must be"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ciphers": "none"}, "ssl_ciphers 'none' names no cipher"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_end_the_start(
    files: dict[str, str], fields: dict[str, str | int], message: str
) -> None:
    given = {name: files.get(str(value), value) for name, value in fields.items()}
    with pytest.raises(ConfigError, match=message):
        tls_context(ServerOptions(**given))  # type: ignore[arg-type]


def test_command_serves_https(files: dict[str, str], demo_model: Path) -> None:
    flags = ("--ssl-certfile", files["cert"], "--ssl-keyfile", files["key"], "--port", "0", "--num-kv-blocks", "16")
    server = ServerProcess(str(demo_model), *flags, is_forked=True)
    try:
        server.wait_ready()
        assert server.url.startswith("https://")
        with httpx.Client(verify=trusting(files), base_url=server.url, timeout=SOCKET_LIMIT_S) as client:
            body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        assert server.stop() == 0
    finally:
        server.close()
