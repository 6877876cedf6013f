"""A Kubernetes service, or a Docker link, called "quire" sets variables that look like flags in the environment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli.command import drop_service_variables, misspelt_variables
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions

Run = Callable[..., Any]

OF_KUBERNETES = {
    "QUIRE_SERVICE_HOST": "10.96.12.7",
    "QUIRE_SERVICE_PORT": "8000",
    "QUIRE_SERVICE_PORT_HTTP": "8000",
    "QUIRE_PORT": "tcp://10.96.12.7:8000",
    "QUIRE_PORT_8000_TCP": "tcp://10.96.12.7:8000",
    "QUIRE_PORT_8000_TCP_PROTO": "tcp",
    "QUIRE_PORT_8000_TCP_PORT": "8000",
    "QUIRE_PORT_8000_TCP_ADDR": "10.96.12.7",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
    """Return the options of servers that would have been started; none is."""
    calls = list[ServerOptions]()

    def start(engine: EngineOptions, options: ServerOptions, fetch: object) -> None:
        calls.append(options)

    monkeypatch.setattr("quire.cli.serve.start", start)
    return calls


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_KUBERNETES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_a_pod")
def test_server_starts_beside_a_service_of_its_name_and_says_what_it_ignores(
    run: Run, started: list[ServerOptions]
) -> None:
    ran = run("serve")
    assert ran.code == 0, ran.err
    assert started == [ServerOptions()]
    (line,) = ran.err.splitlines()
    assert line.startswith("quire: warning: QUIRE_PORT=tcp://10.96.12.7:8000 is ignored")
    assert all(name in line for name in OF_KUBERNETES)


@pytest.mark.usefixtures("in_a_pod")
def test_port_is_the_files_then(run: Run, started: list[ServerOptions], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 7000", encoding="utf-8")
    assert run("serve", "--config", file).code == 0
    assert [options.port for options in started] == [7000]


@pytest.mark.usefixtures("in_a_pod")
def test_command_without_such_a_flag_says_nothing(run: Run) -> None:
    assert run("plan", "--help").err == ""


@pytest.mark.parametrize("value", ["abc", "tcp://nowhere", "tcp://10.96.12.7:8000/x y", "10.96.12.7:8000"])
def test_wrong_port_in_the_environment_is_an_error_that_names_the_variable(
    run: Run, started: list[ServerOptions], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("QUIRE_PORT", value)
    ran = run("serve")
    assert (ran.code, started) == (2, [])
    told = "".join(ran.err.replace("│", "").split())  # the box breaks it into lines
    assert f"the environment has QUIRE_PORT={value!r}".replace(" ", "") in told


@pytest.mark.usefixtures("in_a_pod")
def test_wrong_port_on_the_command_line_is_not_the_environments(run: Run, started: list[ServerOptions]) -> None:
    ran = run("serve", "--port", "tcp://10.96.12.7:8000")
    assert (ran.code, started) == (2, [])
    assert "environment" not in ran.err


def test_port_in_the_environment_still_counts(
    run: Run, started: list[ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PORT", "7000")
    ran = run("serve")
    assert (ran.err, [options.port for options in started]) == ("", [7000])


def test_any_flag_that_has_the_name_of_a_services_address_is_spared() -> None:
    environment = {"QUIRE_METRICS_PORT": "udp://[::1]:53", "QUIRE_PORT": "80", "QUIRE_HOST": "x"}
    warning = drop_service_variables(["port", "metrics-port", "host"], environment)
    assert warning is not None
    assert "QUIRE_METRICS_PORT=udp://[::1]:53 is ignored" in warning
    assert environment == {"QUIRE_PORT": "80", "QUIRE_HOST": "x"}
    assert drop_service_variables(["port", "metrics-port", "host"], environment) is None


def test_variables_that_are_nearly_a_flag_are_told() -> None:
    flags = ["max_num_seqs", "port", "model"]
    told = misspelt_variables(flags, {"QUIRE_MAX_NUM_SEQ": "4", "QUIRE_PROT": "1", "QUIRE_PORT": "2", "MODELS": "3"})
    assert told == (
        "QUIRE_MAX_NUM_SEQ is no flag of this command; did you mean QUIRE_MAX_NUM_SEQS? "
        "QUIRE_PROT is no flag of this command; did you mean QUIRE_PORT?"
    )
    others = {"QUIRE_PROMPT": "of another command", "QUIRE_MODEL": "m"} | OF_KUBERNETES
    assert misspelt_variables(flags, others) is None
