"""Fetching of images from hosts that the operator lists: over https, without redirects, from public addresses alone.

An address is checked where a connection is about to use it, so that a name which resolves otherwise a moment later, or
has private addresses beside public ones, reaches nothing inside of the operator's network.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from socket import AF_INET, AF_INET6, AddressFamily
from typing import NoReturn

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from quire.core.checks import shown
from quire.server.errors import invalid

FETCH_LIMIT_S = 5.0
_CHUNK_BYTES = 64 << 10
_NAT64 = IPv6Network("64:ff9b::/96")    # an IPv4 address in its last 32 bits


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public Internet, also by an IPv4 address that it contains."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(each.is_global and not each.is_multicast for each in (parsed, *_inner(parsed)))


def _inner(address: IPv4Address | IPv6Address) -> Iterable[IPv4Address]:
    """Yield the IPv4 addresses that packets to an IPv6 address may reach."""
    if isinstance(address, IPv4Address):
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if address in _NAT64:
        yield IPv4Address(int(address) & 0xFFFFFFFF)


class CheckedResolver(AbstractResolver):
    """Resolves names to addresses that are allowed. OSError if one of a name's addresses is not."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed

    async def resolve(self, host: str, port: int = 0, family: AddressFamily = AF_INET) -> list[ResolveResult]:
        """Return the addresses of a host, to which the caller connects without asking again."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
        addresses = [(kind, str(address[0])) for kind, _, _, _, address in found if kind in (AF_INET, AF_INET6)]
        if not addresses or not all(self._is_allowed(address) for _, address in addresses):
            raise OSError(f"{host} has an address that is not public")
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=4)  # AI_NUMERICHOST
            for kind, address in dict.fromkeys(addresses)
        ]

    async def close(self) -> None:
        """Release nothing: the resolver holds nothing."""


class ImageFetcher:
    """Fetches images from listed hosts. Lives on one event loop.

    `is_allowed` decides on addresses, `tls` on certificates, by default those that the system trusts. `port`: the only
    one.
    """

    def __init__(
        self, domains: Sequence[str], max_bytes: int, *, is_allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | bool = True, port: int = 443,
    ) -> None:  # fmt: skip
        self._domains = frozenset(domain.lower() for domain in domains)
        self._max_bytes, self._is_allowed, self._tls, self._port = max_bytes, is_allowed, tls, port

    async def fetch(self, where: str, url: str) -> bytes:
        """Return the bytes at a URL. ApiError 400 for one that is not allowed, or fails; `where` names it."""
        checked = self._checked(where, url)
        connector = TCPConnector(resolver=CheckedResolver(self._is_allowed), use_dns_cache=False, ssl=self._tls)
        timeout = ClientTimeout(total=FETCH_LIMIT_S)
        try:
            async with (
                ClientSession(connector=connector, timeout=timeout, trust_env=False, auto_decompress=False) as session,
                session.get(checked, allow_redirects=False, headers={"Accept-Encoding": "identity"}) as response,
            ):
                if response.status != 200:
                    _refuse(where, f"cannot be fetched: the host answered with status {response.status}")
                data = bytearray()
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    data += chunk
                    if len(data) > self._max_bytes:
                        _refuse(where, f"has more than {self._max_bytes} bytes (max_image_bytes)")
                return bytes(data)
        except (ClientError, OSError, ValueError) as error:  # a timeout is an OSError
            _refuse(where, f"cannot be fetched: {shown(str(error) or type(error).__name__)}")

    def _checked(self, where: str, url: str) -> URL:
        """Return a URL as the client reads it. ApiError 400 unless it is of https and its host is in the list."""
        try:
            parsed = URL(url)
            port = parsed.explicit_port
        except ValueError:
            _refuse(where, f"must be a URL, got {shown(url)}")
        if parsed.scheme != "https" or parsed.user is not None or port not in (None, self._port):
            _refuse(where, f"must be a data: URL, or an https: URL without user and port, got {shown(url)}")
        if parsed.host is None or parsed.host.lower() not in self._domains:
            _refuse(where, f"is of a host that is not listed (allowed_media_domains): {shown(parsed.host)}")
        return parsed


def _refuse(where: str, problem: str) -> NoReturn:
    invalid(f"{where} {problem}", param=where)
