"""Where a flag's value comes from: command line before environment before file before default."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from quire.cli.flag_groups import COMMAND_SETTINGS, check_output, flag, load_config, with_config_file, with_flag_groups
from quire.engine.options import EngineOptions


def parse(arguments: list[str]) -> EngineOptions:
    """Return the flags that a command would be called with."""
    seen: list[EngineOptions] = []
    app = typer.Typer()

    @app.command(context_settings=COMMAND_SETTINGS)
    @with_config_file
    @with_flag_groups
    def command(engine: EngineOptions) -> None:
        seen.append(engine)

    app(arguments, standalone_mode=False)
    return seen[0]


def parse_file(tmp_path: Path, content: str, *arguments: str) -> EngineOptions:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    return parse(["--config", str(path), *arguments])


def test_default_when_nothing_else_is_given() -> None:
    assert parse([]).max_num_seqs == 256


def test_file_wins_over_default(tmp_path: Path) -> None:
    assert parse_file(tmp_path, "max_num_seqs: 7").max_num_seqs == 7


def test_environment_wins_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "8")
    assert parse_file(tmp_path, "max_num_seqs: 7").max_num_seqs == 8


def test_command_line_wins_over_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "8")
    assert parse_file(tmp_path, "max_num_seqs: 7", "--max-num-seqs", "9").max_num_seqs == 9


def test_file_can_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_num_seqs: 7")
    monkeypatch.setenv("QUIRE_CONFIG", str(path))
    assert parse([]).max_num_seqs == 7


@pytest.mark.parametrize("key", ["max-num-seqs", "max_num_seqs"])
def test_dash_and_underscore_are_the_same_in_the_file(tmp_path: Path, key: str) -> None:
    assert parse_file(tmp_path, f"{key}: 7").max_num_seqs == 7


@pytest.mark.parametrize("name", ["--max-num-seqs", "--max_num_seqs", "--max_num-seqs"])
def test_dash_and_underscore_are_the_same_on_the_command_line(name: str) -> None:
    assert parse([name, "7"]).max_num_seqs == 7


def test_file_gives_the_model_and_an_argument_wins(tmp_path: Path) -> None:
    assert parse_file(tmp_path, "model: one").model == "one"
    assert parse_file(tmp_path, "model: one", "two").model == "two"


def test_memory_is_read_with_its_unit(tmp_path: Path) -> None:
    assert parse_file(tmp_path, "kv_cache_memory: 512MiB").kv_cache_memory == "512MiB"
    assert parse_file(tmp_path, "kv_cache_memory: 4096").kv_cache_memory == "4096"


@pytest.mark.parametrize("content", ["", "# nothing\n", "max_num_seqs:\n"], ids=["empty", "comment", "null"])
def test_file_without_values_changes_nothing(tmp_path: Path, content: str) -> None:
    assert parse_file(tmp_path, content).max_num_seqs == 256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seq: 7", "unknown option 'max_num_seq'; did you mean max-num-seqs?"),
        ("config: other.yaml", "unknown option 'config'"),
        ("1: 2", "unknown option 1"),
        ("max_num_seqs: 7\nmax-num-seqs: 8", "names 'max-num-seqs' twice"),
        ("max_num_seqs: {a: 1}", "a dict, expected one value"),
        ("- max_num_seqs", "not a list"),
        ("max_num_seqs: [", "not valid YAML"),
        ("max_num_seqs: !!python/object:os.system {}", "not valid YAML"),
        ("max_num_seqs: many", "valid integer"),
        ("max_num_seqs: true", "valid integer"),
        ("max_num_seqs: 2.5", "valid integer"),
        ("dtype: int3", "is not one of"),
    ],
)
def test_bad_file_is_refused_with_the_reason(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        parse_file(tmp_path, content)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="does not exist"):
        parse(["--config", str(tmp_path / "none.yaml")])


def test_repeatable_flag_takes_a_list_from_the_file(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    app = typer.Typer()

    @app.command()
    def command(
        stop: Annotated[list[str], flag("texts")],
        config: Annotated[Path | None, flag("file", is_eager=True, callback=load_config)] = None,
    ) -> None:
        seen.append(stop)

    path = tmp_path / "config.yaml"
    path.write_text("stop: [one, 2]")
    app(["--config", str(path)], standalone_mode=False)
    assert seen == [["one", "2"]]


MODEL = ("simulate", "--hardware", "A100-40GB", "OPT-13B")


@pytest.mark.parametrize(
    "command",
    [
        (*MODEL, "--num-prompts", "100000000", "--json"),
        ("plan", "no/such/model", "--json"),
        ("bench", "throughput", "--repeats", "100000", "--json"),
        ("bench", "serve", "--url", "http://127.0.0.1:9", "--json"),
        ("bench", "calibrate", "--json"),
        ("bench", "control-plane", "--json"),
        ("generate", "--prompt", "a", "no/such/model", "--output"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_output_that_cannot_be_written_is_told_before_anything_is_run(
    run: Callable[..., Any], tmp_path: Path, command: tuple[str, ...]
) -> None:
    ran = run(*command, tmp_path / "missing" / "out.json")
    assert ran.code == 2
    assert "cannot be written" in " ".join(ran.err.replace("│", " ").split())


def test_trying_an_output_leaves_nothing_and_takes_nothing_away(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    for path in (new, old, Path("-"), Path(os.devnull), None):
        assert check_output(path) == path
    assert old.read_text() == "kept"
    assert not new.exists()
    for path in (tmp_path, old / "below"):
        with pytest.raises(typer.BadParameter, match="cannot be written"):
            check_output(path)


def test_pipe_is_not_opened_before_there_is_something_to_say(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    assert check_output(pipe) == pipe, "it would wait for a reader"
