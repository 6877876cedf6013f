"""Addresses and secrets of runs over several machines: what is refused."""

from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.engine.parallel.addresses import key_of, master_address, secret_key


def options(**settings: object) -> EngineOptions:
    return EngineOptions(tensor_parallel_size=2, nnodes=2, **settings)  # type: ignore[arg-type]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    return str(tmp_path / "secret")


def test_only_loopback_goes_without_a_secret(secret: str) -> None:
    assert master_address(options(master_addr="127.0.0.2")) == "127.0.0.2"
    assert master_address(options(master_addr="localhost")) in ("127.0.0.1", "::1")
    assert master_address(options(master_addr="10.0.0.1", node_secret_file=secret)) == "10.0.0.1"
    with pytest.raises(ConfigError, match=r"master_addr 10\.0\.0\.1 can be reached by others: set node_secret_file"):
        master_address(options(master_addr="10.0.0.1"))


def test_public_address_needs_a_flag(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"master_addr 8\.8\.8\.8 is a public address"):
        master_address(options(master_addr="8.8.8.8", node_secret_file=secret))
    allowed = options(master_addr="8.8.8.8", node_secret_file=secret, allow_public_master_addr=True)
    assert master_address(allowed) == "8.8.8.8"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("0.0.0.0", "must be an address of node 0"), ("no such name", "is not an address that is known here")],
)
def test_what_is_no_address_of_a_node_is_refused(name: str, reason: str, secret: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        master_address(options(master_addr=name, node_secret_file=secret))


def test_secret_is_read_without_the_space_around_it(secret: str, tmp_path: Path) -> None:
    assert secret_key(options(node_secret_file=secret)) == key_of(b"0123456789abcdef")
    (tmp_path / "short").write_text("too short\n")
    with pytest.raises(ConfigError, match=r"must have 16 to 4096 bytes, .* got 9"):
        secret_key(options(node_secret_file=str(tmp_path / "short")))
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        secret_key(options(node_secret_file=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 3, "nnodes": 2}, "nnodes must divide tensor_parallel_size 3, got 2"),
        ({"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 2}, "node_rank must be below nnodes 2, got 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineOptions(**settings)  # type: ignore[arg-type]
