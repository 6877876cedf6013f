"""`quire serve` takes the server's options and the engine's, from everywhere that flags come from."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire.cli.serve import serve
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions

Run = Callable[..., Any]
Started = list[tuple[EngineOptions, ServerOptions]]

NOT_LANDED = ["pipeline-parallel"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return what servers would have been started with; none is."""
    calls: Started = []
    monkeypatch.setattr("quire.cli.serve.start", lambda engine, options, fetch: calls.append((engine, options)))
    return calls


def options_of(run: Run, started: Started, *arguments: str) -> ServerOptions:
    ran = run("serve", *arguments)
    assert ran.code == 0, ran.err
    ((_, options),) = started
    return options


def test_flags_are_the_servers_options_with_their_defaults(started: Started) -> None:
    flags = inspect.signature(serve).parameters
    assert {field.name for field in fields(ServerOptions)} <= flags.keys()
    serve(**{name: flag.default for name, flag in flags.items()})
    assert [options for _, options in started] == [ServerOptions()]


def test_help_offers_what_there_is_and_nothing_else(run: Run) -> None:
    offered = run("serve", "--help=all").out
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(ServerOptions)}
    assert flags | {"--config", "--max-logprobs", "--max-num-seqs"} <= set(re.findall(r"--[a-z-]+", offered))
    assert [name for name in NOT_LANDED if name in offered] == []


def test_flags_reach_the_engine_and_the_server(run: Run, started: Started) -> None:
    ran = run(
        "serve", "some/model", "--host", "::1", "--port", "0",
        "--served-model-name", "one", "--served_model_name", "two",
        "--max-queued-requests", "7", "--max-n", "3",
        "--max-logprobs", "5", "--max-body-bytes", "1KiB",
        "--shutdown-timeout", "1.5", "--stall-limit", "7", "--restart-engine", "2",
        "--allow-unauthenticated", "--max-num-seqs", "9",
    )
    assert ran.code == 0
    ((engine, options),) = started
    assert engine == EngineOptions(
        model="some/model", max_num_seqs=9, max_logprobs=5, stall_limit=7.0,
        itl_target_ms="500",
    )  # fmt: skip
    assert options == ServerOptions(
        host="::1", port=0, served_model_name=("one", "two"), allow_unauthenticated=True, max_queued_requests=7,
        max_n=3, max_body_bytes=1024, shutdown_timeout=1.5, stall_limit=7.0,
        restart_engine=2,
    )


def test_keys_come_from_the_environment(run: Run, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "one two")
    assert options_of(run, started, "--host", "0.0.0.0").api_key == ("one", "two")


def test_key_of_the_command_line_wins(run: Run, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "one")
    assert options_of(run, started, "--api-key", "two", "--api-key", "three").api_key == ("two", "three")


def test_help_does_not_tell_keys(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "do-not-tell")
    assert "do-not-tell" not in run("serve", "--help=all").out


def test_options_come_from_a_file(run: Run, started: Started, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("host: 0.0.0.0\napi-key: [one, two]\nport: 0\nallow_unauthenticated: false\nmax-body-bytes: 8MiB\n")
    options = options_of(run, started, "--config", str(path), "--port", "1")
    assert (options.host, options.port, options.api_key) == ("0.0.0.0", 1, ("one", "two"))
    assert (options.allow_unauthenticated, options.max_body_bytes) == (False, 8 << 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], ["host 0.0.0.0", "api_key"]),
        (["--port", "65536"], ["port", "65535"]),
        (["--max-n", "0"], ["max_n", "at least 1"]),
        (["--max-body-bytes", "1 furlong"], ["max_body_bytes", "4GiB"]),
        (["--api-key", ""], ["api_key"]),
        (["--max-num-seqs", "0"], ["max_num_seqs"]),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], words: list[str], run: Run, started: Started) -> None:
    ran = run("serve", *arguments)
    assert (ran.code, ran.out, started) == (1, "", [])
    assert ran.err.startswith("quire: ")
    assert ran.err.count("\n") == 1
    assert [word for word in words if word not in ran.err] == []


def test_wrong_usage_is_told_apart(run: Run) -> None:
    assert run("serve", "--pipeline-parallel-size", "2").code == 2
    assert run("serve", "--port", "http").code == 2


def test_prefix_caching_is_on_unless_it_is_switched_off(run: Run, started: Started) -> None:
    for arguments, enabled in (((), True), (("--no-enable-prefix-caching",), False)):
        assert run("serve", *arguments).code == 0
        engine, _ = started.pop()
        assert engine.enable_prefix_caching is enabled


def test_shares_of_keys_reach_the_engine_and_the_server(run: Run, started: Started) -> None:
    ran = run(
        "serve", "--api-key", "one", "--api-key", "two", "--operator-api-key", "op", "--key-weights", "2,1",
        "--scheduling-policy", "fair", "--max-kv-share-per-key", "0.5", "--max-requests-per-key", "9",
        "--allow-client-priority", "--max-pinned-share", "0.3", "--max-pinned-share-per-key", "0.1", "--pin-ttl", "0",
        "--max-pinned-prefixes", "0",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    ((engine, options),) = started
    assert (engine.scheduling_policy, engine.max_kv_share_per_key) == ("fair", 0.5)
    assert (options.key_weights, options.operator_api_key, options.allow_client_priority) == ((2.0, 1.0), "op", True)
    assert (options.max_requests_per_key, options.max_pinned_prefixes, options.pin_ttl) == (9, 0, 0)
    assert (options.max_pinned_share, options.max_pinned_share_per_key) == (0.3, 0.1)


def test_operators_key_comes_from_the_environment_and_is_not_told(
    run: Run, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_OPERATOR_API_KEY", "do-not-tell")
    assert options_of(run, started).operator_api_key == "do-not-tell"
    assert "do-not-tell" not in run("serve", "--help=all").out
    assert "do-not-tell" not in run("serve", "--port", "-1").err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--key-weights", "two"), "key_weights must be"),
        (("--key-weights", "2"), "for the 0 keys"),
        (("--operator-api-key", "a b"), "operator_api_key must not"),
        (("--max-pinned-share", "2"), "max_pinned_share must be a number above 0, at most 1, got 2.0"),
        (("--scheduling-policy", "lifo"), "lifo"),
    ],
)
def test_share_that_cannot_work_is_named(run: Run, started: Started, flags: tuple[str, str], told: str) -> None:
    ran = run("serve", *flags)
    assert ran.code != 0
    assert told in ran.err
    assert started == []
