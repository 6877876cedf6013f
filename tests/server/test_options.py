"""Settings of the server, checked before anything is loaded."""

from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.server.options import ServerOptions, parse_key_weights, parse_names


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
        {"operator_api_key": ""},
        {"operator_api_key": "with space"},
        {"key_weights": (1.0,)},
        {"max_requests_per_key": -1},
        {"max_kv_share_per_key": 0.0},
        {"max_pinned_prefixes": -1},
        {"max_pinned_prefixes": 65},
        {"max_pinned_share": 1.1},
        {"max_pinned_share_per_key": 0.0},
        {"pin_ttl": -1.0},
        {"pin_ttl": float("nan")},
        {"pin_ttl": float("inf")},
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


def test_operators_key_is_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^operator_api_key must not be one of api_key"):
        ServerOptions(api_key=("one", "two"), operator_api_key="two")


def test_keys_are_not_shown() -> None:
    shown = repr(ServerOptions(api_key=("secret-1",), operator_api_key="secret-2"))
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("texts", "weights"),
    [
        ([], ()),
        (["2,1"], (2.0, 1.0)),
        (["3=0.5"], (1.0, 1.0, 0.5)),
        (["2", "4"], (2.0, 4.0)),
        (["2=3,1=7"], (7.0, 3.0)),
    ],
)
def test_weights_are_read_by_order_or_by_number(texts: list[str], weights: tuple[float, ...]) -> None:
    assert parse_key_weights(texts) == weights


@pytest.mark.parametrize("text", ["", "two", "0=1", "1=", "=1=2", "-1=2", "65537=1", "1.5=2"])
def test_what_is_no_weight_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^key_weights must be"):
        parse_key_weights([text])


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weight_out_of_range_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"^key_weights must be above 0 and finite"):
        ServerOptions(api_key=("a",), key_weights=(weight,))


def test_weight_is_that_of_the_key() -> None:
    options = ServerOptions(api_key=("a", "b", "c"), key_weights=(2.0, 0.5))
    assert [options.weight_of(number) for number in (-1, 0, 1, 2, 3)] == [1.0, 1.0, 2.0, 0.5, 1.0]


def test_lists_are_read_as_json_or_one_by_one() -> None:
    assert parse_names("allowed_origins", ['["https://a.example", "https://b.example"]', "*"]) == (
        "https://a.example", "https://b.example", "*",
    )  # fmt: skip
    for wrong in ('["a", 1]', '["a"', '[""]', ""):
        with pytest.raises(ConfigError, match="allowed_origins must be a text or a list of texts as JSON"):
            parse_names("allowed_origins", [wrong])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"root_path": "llm"}, "root_path must begin with / and not end with it, got 'llm'"),
        ({"root_path": "/llm/"}, "root_path must begin with /"),
        ({"root_path": "/%6c"}, "root_path must be ASCII without escapes"),
        ({"uds": ""}, "uds must be a path"),
        ({"allow_credentials": True}, r"allow_credentials needs allowed_origins by name"),
        ({"allow_credentials": True, "allowed_origins": ("*",)}, "by name, not"),
    ],
)
def test_paths_and_origins_that_cannot_work_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ServerOptions(**options)


def test_unix_socket_needs_no_key() -> None:
    ServerOptions(uds="/tmp/quire.sock", host="0.0.0.0")
