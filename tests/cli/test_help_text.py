"""Help of commands: short by default, by group, flag and word; no name is cut."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from quire.cli.help_text import COMMON

Run = Callable[..., Any]

LONGEST = "--enable-prefix-caching / --no-enable-prefix-caching"
COMMANDS = (["serve"], ["generate"], ["chat"], ["deploy"], ["run-batch"], ["plan"], ["simulate"], ["bench", "serve"])


def test_short_help_has_the_flags_that_people_use_and_the_groups_of_all_others(run: Run) -> None:
    shown = run("serve", "--help").out
    assert re.findall(r"^  --([a-z-]+)", shown, re.MULTILINE) == [name.replace("_", "-") for name in COMMON]
    assert all(group in shown for group in ("model 2", "cache 2", "limits 6", "--help=GROUP", "--help=all"))
    assert shown.count("\n") <= 45


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_line_is_wider_than_the_terminal_and_no_flag_is_cut(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*command, "--help=all").out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_all_flags_are_there_in_full(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    shown = run("serve", "--help=all").out
    assert f"  {LONGEST}\n" in shown
    assert "--gpu-memory-utilization" in shown


@pytest.mark.parametrize("topic", ["cache", "Cache", "CacheConfig", "cacheconfig"])
def test_group_has_its_flags_alone(run: Run, topic: str) -> None:
    shown = run("serve", f"--help={topic}").out
    assert shown.startswith("Cache:\n")
    assert "--block-size" in shown
    assert "--port" not in shown


@pytest.mark.parametrize("topic", ["max-model-len", "max_model_len", "--max-model-len"])
def test_flag_is_described_at_length(run: Run, topic: str) -> None:
    shown = run("serve", f"--help={topic}").out
    assert shown.startswith("--max-model-len INT\n")
    assert "QUIRE_MAX_MODEL_LEN" in shown
    assert "max_position_embeddings" in shown       # what docs/reference.md says
    assert "](" not in shown


def test_flag_of_one_command_is_not_described_as_that_of_another(run: Run) -> None:
    assert "for the server" in run("chat", "--help=api-key").out
    assert "lets clients in" not in run("chat", "--help=api-key").out


def test_short_flag_is_found(run: Run) -> None:
    assert run("serve", "--help=-tp").out.startswith("--tensor-parallel-size, -tp INT\n")


@pytest.mark.parametrize(
    ("word", "flag"), [("context", "--max-model-len"), ("CORS", "--allowed-origins")]
)
def test_word_finds_flags_whose_texts_have_it(run: Run, word: str, flag: str) -> None:
    assert flag in run("serve", f"--help={word}").out


def test_unknown_topic_is_wrong_usage_with_the_nearest_name(run: Run) -> None:
    ran = run("serve", "--help=max-modell-len")
    assert ran.code == 2
    assert "did you mean max-model-len?" in " ".join(ran.err.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())


def test_own_flags_come_first_and_the_engines_are_folded(run: Run) -> None:
    shown = run("chat", "--help").out
    assert shown.index("--system") < shown.index("--temperature") < shown.index("--url") < shown.index("Often used")
    assert "--block-size" not in shown
    assert run("deploy", "--help").out.index("--replicas") < run("deploy", "--help").out.index("Often used")


def test_command_of_few_flags_shows_all(run: Run) -> None:
    assert "--help=GROUP" not in run("bench", "control-plane", "--help").out


def test_topic_behind_a_model_is_read_and_behind_two_dashes_is_not(run: Run) -> None:
    assert run("serve", "some/model", "--help=lora").out.startswith("LoRA:\n")
    assert run("serve", "--", "--help=lora").code == 1      # a model of that name
