"""Fetching of images: listed hosts, public addresses, no redirects, bounded."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from quire.core.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.images import fetching
from quire.server.images.fetching import CheckedResolver, ImageFetcher, is_public
from quire.server.options import ServerOptions

WHERE = "messages[0].content[0]"
HOST = "localhost"  # the only name that resolves without a network

PRIVATE = (
    "127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:db8::1",
    "2001:0:7f00:1::", "localhost", "", "0x7f000001",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _answers_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FETCH_LIMIT_S", 120.0)


@pytest.mark.parametrize("address", PRIVATE)
def test_no_address_inside_of_a_network_is_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


async def refusal(fetching: Awaitable[object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await fetching
    assert (caught.value.status, caught.value.param) == (400, WHERE)
    return caught.value


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://images.example/a.png", "must be a data: URL, or an https: URL"),
        ("https://images.example:8443/a.png", "without user and port"),
        ("https://images.example@other.example/a.png", "without user and port"),
        ("https://user:secret@images.example/a.png", "without user and port"),
        ("https://other.example/a.png", "is of a host that is not listed (allowed_media_domains): 'other.example'"),
        ("https://images.example.other.example/", "not listed"),
        ("https://sub.images.example/a.png", "not listed"),
        ("https://images.example./a.png", "not listed"),
        ("https://127.0.0.1/a.png", "not listed"),
        ("https://[::1]/a.png", "not listed"),
        ("https:///a.png", "not listed"),
        ("https://[::1", "must be"),
        ("ftp://images.example/a.png", "must be a data: URL"),
        ("file:///etc/passwd", "must be a data: URL"),
        ("images.example/a.png", "must be a data: URL"),
    ],
)
def test_urls_of_other_forms_and_hosts_are_refused(url: str, expected: str) -> None:
    fetcher = ImageFetcher(["images.example"], 1000)
    assert expected in asyncio.run(refusal(fetcher.fetch(WHERE, url))).message


def addresses(*found: str) -> Callable[..., Awaitable[list[tuple[object, ...]]]]:
    """Return a look-up of names that gives these addresses, one list at a time."""
    families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in found]

    async def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [
            (family, 1, 6, "", (address, port)) for family, address in zip(families, found, strict=True)
        ]

    return look_up


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(*found: str) -> list[str]:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses(*found), raising=False)
        return [each["host"] for each in await CheckedResolver(is_public).resolve("images.example", 443)]

    assert asyncio.run(check("93.184.215.14", "2606:2800::1")) == ["93.184.215.14", "2606:2800::1"]
    for found in (("93.184.215.14", "10.0.0.1"), ("::ffff:127.0.0.1",), ()):
        with pytest.raises(OSError, match="has an address that is not public"):
            asyncio.run(check(*found))


def test_a_name_is_looked_up_once_and_its_address_is_the_one_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to another address a moment later is not asked for again."""
    asked = list[str]()

    async def check() -> None:
        async def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            asked.append(host)
            return [(socket.AF_INET, 1, 6, "", ("10.0.0.1" if len(asked) == 1 else "127.0.0.1", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up, raising=False)
        error = await refusal(ImageFetcher(["images.example"], 1000).fetch(WHERE, "https://images.example/a"))
        assert "cannot be fetched" in error.message

    asyncio.run(check())
    assert asked == ["images.example"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make certificates with")
def test_what_a_host_may_answer(tmp_path: Path) -> None:
    """With a host of this machine, for which the check of addresses is another one."""
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=quire"]
    command += ["-addext", f"subjectAltName=DNS:{HOST}", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(certificate, key)
    client_tls = ssl.create_default_context(cafile=certificate)
    asked = list[str]()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        match request.path:
            case "/image":
                return web.Response(body=b"image")
            case "/moved":
                raise web.HTTPFound("/image")
            case "/long":
                return web.Response(body=b"x" * 2000)
        raise web.HTTPNotFound

    async def check() -> None:
        app = web.Application()
        app.router.add_get("/{path}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls).start()
        port = runner.addresses[0][1]
        base = f"https://{HOST}:{port}"
        try:
            own = ImageFetcher([HOST], 1000, is_allowed=lambda _: True, tls=client_tls, port=port)
            assert await own.fetch(WHERE, f"{base}/image") == b"image"
            assert "with status 302" in (await refusal(own.fetch(WHERE, f"{base}/moved"))).message
            assert "more than 1000 bytes (max_image_bytes)" in (await refusal(own.fetch(WHERE, f"{base}/long"))).message
            assert "with status 404" in (await refusal(own.fetch(WHERE, f"{base}/none"))).message
            stranger = ImageFetcher([HOST], 1000, is_allowed=lambda _: True, port=port)
            assert "cannot be fetched" in (await refusal(stranger.fetch(WHERE, f"{base}/image"))).message
            num_asked = len(asked)
            guarded = ImageFetcher([HOST], 1000, tls=client_tls, port=port)
            assert "cannot be fetched" in (await refusal(guarded.fetch(WHERE, f"{base}/image"))).message
            assert len(asked) == num_asked, "a connection to this machine"
        finally:
            await runner.cleanup()

    asyncio.run(check())


def test_hosts_are_names() -> None:
    assert ServerOptions(allowed_media_domains=("images.example", "a-b.c1.example")).allowed_media_domains
    for wrong in ("127.0.0.1", "https://images.example", "*.example", "images.example:443", "", "localhost", "[::1]"):
        with pytest.raises(ConfigError, match="allowed_media_domains must be names such as"):
            ServerOptions(allowed_media_domains=(wrong,))
