"""`quire generate` gives what `LLM.generate` gives, and one clear line where it cannot."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams

LIMIT_S = 120
QUIRE = [sys.executable, "-c", "from quire.cli.main import main; main()"]
SMALL = ("--num-kv-blocks", "64", "--max-num-seqs", "8", "--max-model-len", "256")

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> LLM:
    return LLM(model=str(demo_model), num_kv_blocks=64, max_num_seqs=8, max_model_len=256)


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prompt_is_completed(run: Run, llm: LLM) -> None:
    expected = llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    ran = run("generate", "--prompt", "def add(a, b):", "--temperature", 0, "--max-tokens", 12, *SMALL)
    assert (ran.code, ran.out, ran.err) == (0, expected[0].outputs[0].text + "\n", "")


def test_beams_are_searched_for_all_prompts(run: Run, llm: LLM, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"prompt": "class A", "id": 7}, {"prompt_token_ids": [5, 6, 7]})
    ran = run("generate", "--input", path, "--beam-width", 3, "--length-penalty", 0.5, "--max-tokens", 6, *SMALL)
    expected = llm.beam_search(["class A", [5, 6, 7]], BeamSearchParams(3, 6, length_penalty=0.5), use_tqdm=False)
    records = [json.loads(line) for line in ran.out.splitlines()]
    assert (ran.code, [record.get("id") for record in records]) == (0, [7, None])
    assert [[each["token_ids"] for each in record["outputs"]] for record in records] == [
        [completion.token_ids for completion in output.outputs] for output in expected
    ]
    text = run("generate", "--prompt", "class A", "--beam-width", 1, "--max-tokens", 6, *SMALL)
    (best,) = llm.beam_search(["class A"], BeamSearchParams(1, 6), use_tqdm=False)
    assert (text.code, text.out) == (0, best.outputs[0].text + "\n")


@pytest.mark.parametrize(
    ("flags", "line", "named"),
    [
        (("--beam-width", 2, "--top-p", 0.5), {}, "top_p"),
        (("--beam-width", 2, "--n", 2), {}, "n is"),
        (("--beam-width", 0), {}, "beam_width"),
        (("--length-penalty", 2), {}, "length_penalty"),
        (("--beam-width", 2), {"max_tokens": 3}, "line 1"),
        (("--beam-width", 2), {"prompt": "x " * 300}, "line 1"),
    ],
)
def test_what_a_beam_search_cannot_obey_is_refused(
    run: Run, tmp_path: Path, flags: tuple[object, ...], line: dict[str, Any], named: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"prompt": "class A"} | line)
    ran = run("generate", "--input", path, *flags, *SMALL)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert named in ran.err


def test_model_is_an_argument(run: Run, demo_model: Path) -> None:
    command = ("--prompt", "import ", "--temperature", 0, "--max-tokens", 5, *SMALL)
    assert run("generate", demo_model, *command) == run("generate", *command)


def test_prompt_comes_from_standard_input(run: Run) -> None:
    flags = ("--temperature", 0, "--max-tokens", 5, *SMALL)
    assert run("generate", *flags, stdin="import ").out == run("generate", "--prompt", "import ", *flags).out


def test_prompt_comes_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--temperature", 0, "--max-tokens", 5, *SMALL)
    expected = run("generate", "--prompt", "import ", *flags).out
    monkeypatch.setenv("QUIRE_PROMPT", "import ")
    assert run("generate", *flags).out == expected


def test_seed_decides_what_is_sampled(run: Run) -> None:
    command = ("generate", "--prompt", "def ", "--max-tokens", 16, *SMALL)
    outs = [run(*command, "--sampling-seed", seed).out for seed in (1, 1, 2)]
    assert outs[0] == outs[1] != outs[2]


def run_with_encoding(encoding: str, *arguments: object) -> str:
    """Return what a real process writes to a standard output of this encoding."""
    ran = subprocess.run(
        [*QUIRE, *map(str, arguments), *SMALL],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    return ran.stdout.decode()


def test_characters_that_the_output_cannot_hold_end_nothing(llm: LLM, tmp_path: Path) -> None:
    assert llm.tokenizer is not None
    no_ascii = llm.tokenizer.encode("é", add_special_tokens=False)
    record = {"prompt": "日本", "id": "\ud800", "max_tokens": 1, "allowed_token_ids": no_ascii}
    command = ("generate", "--input", write_lines(tmp_path / "in.jsonl", record))
    for encoding in ("utf-8", "ascii"):
        answer = json.loads(run_with_encoding(encoding, *command))
        assert (answer["prompt"], answer["id"]) == (record["prompt"], record["id"])
    assert run_with_encoding("ascii", *command, "--format", "text") == "?\n"


def test_file_is_answered_in_its_order_with_its_own_parameters(run: Run, llm: LLM, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "in.jsonl",
        {"prompt": "class A", "max_tokens": 20, "id": "long"},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 2, "prompt_logprob_token_ids": [[6], [7, 9]]},
        {"prompt": "import ", "n": 2, "temperature": 0.9, "seed": 3, "logprobs": 1},
    )
    ran = run("generate", "--input", path, "--temperature", 0, "--max-tokens", 6, *SMALL)
    records = [json.loads(line) for line in ran.out.splitlines()]
    expected = llm.generate(
        ["class A", [5, 6, 7], "import "],
        [
            SamplingParams(temperature=0, max_tokens=20),
            SamplingParams(temperature=0, max_tokens=2),
            SamplingParams(temperature=0.9, max_tokens=6, n=2, seed=3, logprobs=1),
        ],
        use_tqdm=False,
    )
    assert ran.code == 0
    assert [[completion["token_ids"] for completion in record["outputs"]] for record in records] == [
        [completion.token_ids for completion in output.outputs] for output in expected
    ]
    assert [record.get("id") for record in records] == ["long", None, None]
    assert records[1]["prompt_token_ids"] == [5, 6, 7]
    padded = [[each is None for each in row] for row in records[1]["prompt_token_id_logprobs"]]
    assert padded == [[False, True], [False, False]]
    sampled = records[2]["outputs"][1]
    assert sampled["text"] == expected[2].outputs[1].text
    assert sampled["cumulative_logprob"] == expected[2].outputs[1].cumulative_logprob
    assert [position[0]["token_id"] for position in sampled["logprobs"]] == sampled["token_ids"]


def test_lines_have_their_own_grammars(run: Run, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    path = write_lines(
        tmp_path / "in.jsonl",
        {"prompt": "class A", "structured_outputs": {"regex": "[0-9]{3}"}},
        {"prompt": "class A", "structured_outputs": {"json": schema, "disable_any_whitespace": True}},
        {"messages": [{"role": "user", "content": "Well?"}], "structured_outputs": {"choice": ["yes", "no"]}},
    )
    ran = run("generate", "--input", path, "--max-tokens", 20, "--temperature", 0, *SMALL)
    assert ran.code == 0
    texts = [json.loads(line)["outputs"][0]["text"] for line in ran.out.splitlines()]
    assert re.fullmatch("[0-9]{3}", texts[0])
    assert json.loads(texts[1])["a"] in (1, 2)
    assert texts[2] in ("yes", "no")


def test_chat_goes_through_the_models_template(run: Run, llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Sort a list."}]
    path = write_lines(tmp_path / "in.jsonl", {"messages": messages})
    [record] = [json.loads(run("generate", "--input", path, "--temperature", 0, "--max-tokens", 6, *SMALL).out)]
    [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert record["messages"] == messages
    assert record["num_prompt_tokens"] == len(expected.prompt_token_ids)
    assert record["outputs"][0]["token_ids"] == expected.outputs[0].token_ids


def test_output_goes_to_a_file(run: Run, tmp_path: Path) -> None:
    command = ("generate", "--prompt", "import ", "--temperature", 0, "--max-tokens", 4, *SMALL)
    path = tmp_path / "out.txt"
    printed = run(*command).out
    assert run(*command, "--output", path).out == ""
    assert path.read_text() == printed


def test_lines_come_from_standard_input(run: Run) -> None:
    ran = run("generate", "--input", "-", "--max-tokens", 2, *SMALL, stdin='{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [json.loads(line)["prompt"] for line in ran.out.splitlines()] == ["a", "b"]


def test_formats_can_be_chosen(run: Run, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"prompt": "import "})
    flags = ("--temperature", 0, "--max-tokens", 4, *SMALL)
    text = run("generate", "--prompt", "import ", *flags).out
    assert run("generate", "--input", path, "--format", "text", *flags).out == text
    as_json = run("generate", "--prompt", "import ", "--format", "jsonl", *flags).out
    assert json.loads(as_json)["outputs"][0]["text"] + "\n" == text


@pytest.mark.parametrize(
    ("bad", "message"),
    [('"top_p": 7', "top_p must be"), ('"structured_outputs": {"regexp": "a"}', "structured_outputs has no field")],
)
def test_bad_line_stops_everything_before_a_model_is_loaded(
    run: Run, tmp_path: Path, bad: str, message: str
) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{{"prompt": "a", {bad}}}\n')
    ran = run("generate", tmp_path / "no-such-model", "--input", path, "--output", out)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"quire: {path}, line 3: {message}")
    assert not out.exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt_token_ids": [5] * 256}, "max_model_len"),
        ({"prompt_token_ids": [10**6]}, "token ids must be integers from 0"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt": "a", "n": 9}, "n is 9"),
        ({"prompt": "a", "structured_outputs": {"regex": "(a"}}, "structured_outputs cannot be used"),
        ({"prompt": "a", "structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ],
)
def test_line_that_the_model_refuses_is_named_and_nothing_runs(
    run: Run, tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    path, out = write_lines(tmp_path / "in.jsonl", {"prompt": "fine"}, record), tmp_path / "out.jsonl"
    ran = run("generate", "--input", path, "--output", out, *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert f"{path}, line 2: " in ran.err
    assert message in ran.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate",), 2, "nothing to complete"),
        (("generate", "--prompt", "a", "--input", "in.jsonl"), 2, "not both"),
        (("generate", "no/such/folder", "--prompt", "a"), 1, "no/such/folder"),
        (("generate", "--prompt", "a", "--temperature", "nan"), 1, "temperature must be"),
        (("generate", "--prompt", "a", "--max-tokens", "0"), 1, "max_tokens must be"),
        (("generate", "--prompt", "a", "--kv-cache-memory", "lots"), 1, "kv_cache_memory must be"),
        (("generate", "--prompt", "a", "--block-size", "12"), 1, "block_size must be"),
        (("generate", "--prompt", "a", "--device", "tpu"), 2, "--device"),
        (("generate", "--prompt", "a", "--pipeline-parallel-size", "2"), 2, "-size 2 is not supported"),
        (("generate", "--input", "no-such-file.jsonl"), 1, "no-such-file.jsonl"),
        (("bench", "throughput", "--repeats", "0"), 2, "--repeats"),
        (("fly",), 2, "No such command"),
        (("ps",), 2, "no command 'ps'; did you mean quire top"),
    ],
)
def test_what_cannot_work_ends_with_a_code_and_a_reason(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err
    assert "Traceback" not in ran.err
    if code == 1:
        assert ran.err.startswith("quire: ")
        assert ran.err.count("\n") == 1


def test_missing_file_is_told_by_its_name_alone(run: Run) -> None:
    assert run("generate", "--input", "no-file.jsonl").err == "quire: no-file.jsonl: No such file or directory\n"


def test_version(run: Run) -> None:
    assert run("--version")[:2] == (0, "quire 0.1.0\n")


def test_help_shows_what_is_there_and_nothing_else(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 160)  # a narrow terminal cuts the names of flags
    commands = [
        "serve", "generate", "chat", "run", "pull", "list", "show", "rm", "top", "replay", "report", "plan", "simulate",
        "pack", "session", "deploy", "route", "paper", "bench", "run-batch",
    ]  # fmt: skip
    assert re.findall(r"^│ ([a-z]\S*) ", run("--help").out, re.MULTILINE) == commands
    flags = run("generate", "--help=all").out
    assert "--kv-cache-memory" in flags
    assert not any(name in flags for name in ("pipeline-parallel", "--host"))


def generating() -> subprocess.Popen[bytes]:
    """Start a process that says more than its pipe holds: it does not come to its end before it has been read."""
    command = [*QUIRE, "generate", "--prompt", "def ", "--ignore-eos", "--max-tokens", "2000", "--num-kv-blocks", "128"]
    return subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pipesize=4096)


def test_real_process_streams_and_survives_a_reader_that_leaves(demo_model: Path) -> None:
    with generating() as process:
        assert process.stdout.read(1)
        process.stdout.close()
        complaint = process.stderr.read().decode()
        assert process.wait(LIMIT_S) == 1
    assert complaint == ""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let children of this process be interrupted, also when it was started in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_real_process_ends_on_interrupt_without_a_traceback(demo_model: Path) -> None:
    with generating() as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert b"Traceback" not in complaint


def test_what_no_flag_says_is_the_models_default(run: Run, llm: LLM, tmp_path: Path) -> None:
    (expected,) = llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    prompt = ("--prompt", "def add(a, b):", *SMALL)
    asked = ("--override-generation-config", '{"temperature": 0, "max_new_tokens": 5}')
    ran = run("generate", *prompt, *asked)
    assert (ran.code, ran.out) == (0, expected.outputs[0].text + "\n")
    longer = run("generate", *prompt, *asked, "--max-tokens", 9)
    assert len(longer.out) > len(ran.out)
    assert longer.out.startswith(expected.outputs[0].text)
    lines = {"prompt": "def add(a, b):"}, {"prompt": "def add(a, b):", "max_tokens": 3}
    path = write_lines(tmp_path / "in.jsonl", *lines)
    records = [json.loads(line) for line in run("generate", "--input", path, *SMALL, *asked).out.splitlines()]
    assert [len(record["outputs"][0]["token_ids"]) for record in records] == [5, 3]
    assert records[0]["outputs"][0]["token_ids"] == list(expected.outputs[0].token_ids)
    refused = run("generate", *prompt, "--override-generation-config", '{"top_p": 2}')
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "override_generation_config: top_p must be a number above 0 to 1, got 2" in refused.err
