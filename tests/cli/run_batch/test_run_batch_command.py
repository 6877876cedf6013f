"""`quire run-batch` answers a file as the server's routes would."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from support.metrics_page import read_metrics
from support.nodes import START, free_port
from support.server import ANSWER_LIMIT_S, wait_until

Run = Callable[..., Any]
SMALL = ("--num-kv-blocks", "64", "--max-num-seqs", "4", "--max-model-len", "256")
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["def add(a, b):", "class Reader:", "import os", "x = 1", "for i in", "while True"]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"temperature": 0, "max_tokens": 5} | body}


def test_each_line_gets_its_answer_in_the_order_of_the_lines(run: Run, tmp_path: Path, demo_model: Path) -> None:
    completions = [line(f"p{number}", COMPLETION, prompt=text) for number, text in enumerate(PROMPTS)]
    chat = line("chat", CHAT, messages=[{"role": "user", "content": "What does read_file do?"}])
    long = line("long", COMPLETION, prompt=[5] * 300)
    other = line("other", COMPLETION, prompt="x", model="another")
    named = line("named", "/no/such/url", prompt="x")
    path, out = write(tmp_path / "in.jsonl", *completions, named, chat, long, other), tmp_path / "out.jsonl"
    ran = run("run-batch", "-i", path, "-o", out, "--max-inflight", 3, *SMALL)
    assert (ran.code, ran.out) == (0, ""), ran.err
    assert ran.err.endswith("10 lines answered, 3 of them with an error\n")
    answers = [json.loads(each) for each in out.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == [*(f"p{n}" for n in range(6)), "named", "chat", "long", "other"]
    with LLM(demo_model, max_model_len=256, num_kv_blocks=64) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    bodies = [each["response"]["body"] for each in answers[:6]]
    assert [body["choices"][0]["text"] for body in bodies] == [output.outputs[0].text for output in outputs]
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in answers[:6])
    assert bodies[0]["id"] == answers[0]["response"]["request_id"]
    assert answers[7]["response"]["body"]["choices"][0]["message"]["content"]
    assert answers[6]["error"]["message"].startswith("line 7: url must be one of")
    assert (answers[8]["response"]["status_code"], answers[8]["error"]["code"]) == (400, "context_length_exceeded")
    assert (answers[9]["response"]["status_code"], answers[9]["error"]["code"]) == (404, "model_not_found")
    assert len({each["id"] for each in answers}) == len(answers)


def test_metrics_are_served_from_the_start_to_the_end_of_a_run_whose_lines_come_late(
    tmp_path: Path, demo_model: Path
) -> None:
    url, out = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "out.jsonl"
    out.touch()     # one that is not there is made and removed again by the check of the flag
    flags = ("-i", "-", "-o", out, "--enable-metrics", "--url", "127.0.0.1", "--port", port, *SMALL)
    command = [sys.executable, "-c", START, "run-batch", demo_model, *flags]
    with subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        for number in range(2):
            process.stdin.write(json.dumps(line(str(number), COMPLETION, prompt="x")) + "\n")
            process.stdin.flush()
            wait_until(lambda: out.read_text().count("\n") == number + 1)  # noqa: B023 (called here)
            assert read_metrics(url)['vllm:request_success_total{finished_reason="length"}'] == number + 1
        for path, status in {"/": 200, "/v1/models": 404}.items():
            assert httpx.get(f"{url}{path}", timeout=ANSWER_LIMIT_S).status_code == status
        process.stdin.close()
        told = process.stderr.read()
    assert (process.returncode, told.splitlines()[-1]) == (0, "2 lines answered, 0 of them with an error")
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.parametrize("is_named", [False, True], ids=["standard input", "named pipe"])
def test_interrupt_ends_a_run_that_waits_for_a_line(tmp_path: Path, demo_model: Path, is_named: bool) -> None:
    out, pipe = tmp_path / "out.jsonl", tmp_path / "pipe"
    os.mkfifo(pipe)
    out.touch()     # one that is not there is made and removed again by the check of the flag
    flags = ("-i", pipe if is_named else "-", "-o", out, *SMALL)
    start = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {START}"  # tests may ignore it
    command = [sys.executable, "-c", start, "run-batch", demo_model, *flags]
    with (
        subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        pipe.open("w") if is_named else nullcontext(process.stdin) as lines,
    ):
        assert lines is not None
        lines.write(json.dumps(line("0", COMPLETION, prompt="x")) + "\n")
        lines.flush()
        wait_until(lambda: out.read_text().count("\n") == 1)
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(60)
        finally:
            process.kill()
        assert process.stderr is not None
        assert (code, process.stderr.read()) == (130, "")


@pytest.mark.usefixtures("forked_processes")
def test_malformed_lines_change_the_exit_code_and_no_other_answer(run: Run, tmp_path: Path) -> None:
    nameless = line("", COMPLETION, prompt="x") | {"custom_id": None}
    path, out = write(tmp_path / "in.jsonl", nameless, "{", line("1", COMPLETION, prompt="x")), tmp_path / "out.jsonl"
    ran = run("run-batch", "-i", path, "-o", out, *SMALL)
    assert (ran.code, ran.out) == (1, ""), ran.err
    told = "3 lines answered, 2 of them with an error\n2 lines are malformed: they have no custom_id\n"
    assert ran.err.endswith(told)
    answers = [json.loads(each) for each in out.read_text().splitlines()]
    assert answers[0]["error"]["message"].startswith("line 1: custom_id must be a string")
    assert answers[1]["error"]["message"].startswith("line 2 is not JSON")
    assert (answers[2]["custom_id"], answers[2]["response"]["status_code"], answers[2]["error"]) == ("1", 200, None)


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (("--max-inflight", 0), 1, "max_inflight must be at least 1, got 0"),
        (("--max-lines", 1), 1, "more than 1 lines (max_lines)"),
    ],
)
def test_bounds_that_are_broken_end_the_run(run: Run, tmp_path: Path, flags: Any, code: int, told: str) -> None:  # noqa: ANN401
    path = write(tmp_path / "in.jsonl", *[line(str(number), COMPLETION, prompt="x") for number in range(2)])
    ran = run("run-batch", "-i", path, "-o", tmp_path / "out.jsonl", *flags, *SMALL)
    assert ran.code == code
    assert told in ran.err


def test_output_never_takes_the_place_of_the_input(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", line("1", COMPLETION, prompt="x"))
    ran = run("run-batch", "-i", path, "-o", path)
    assert ran.code == 2
    assert json.loads(path.read_text())["custom_id"] == "1"
