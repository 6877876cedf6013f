"""Settings of the server, checked before anything is loaded."""

from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.server.options import ServerOptions


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_key(host: str) -> None:
    assert ServerOptions(host=host).api_key == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "localhost.example.org"])
def test_other_hosts_need_a_key_or_a_decision(host: str) -> None:
    with pytest.raises(ConfigError, match="api_key, or allow_unauthenticated"):
        ServerOptions(host=host)
    ServerOptions(host=host, api_key=("key",))
    ServerOptions(host=host, allow_unauthenticated=True)


@pytest.mark.parametrize(
    "values",
    [
        {"host": ""},
        {"port": -1},
        {"port": 65536},
        {"max_queued_requests": 0},
        {"max_n": 0},
        {"max_body_bytes": 0},
        {"shutdown_timeout": -1.0},
        {"stall_limit": 0.0},
        {"restart_engine": -1},
        {"restart_engine": 1001},
        {"stall_limit": float("nan")},
        {"stall_limit": 1e6},
        {"shutdown_timeout": float("nan")},
        {"shutdown_timeout": float("inf")},
        {"api_key": ("",)},
        {"api_key": ("good", "with space")},
        {"api_key": ("line\n",)},
        {"served_model_name": ("",)},
        {"served_model_name": ("two\nlines",)},
    ],
)
def test_value_that_cannot_work_is_named(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"^{name} must"):
        ServerOptions(**values)


def test_refused_key_is_not_told() -> None:
    with pytest.raises(ConfigError) as refused:
        ServerOptions(api_key=("secret word",))
    assert "secret" not in str(refused.value)
