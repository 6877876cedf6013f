"""JSONL in: each line becomes a job, or an error with its number."""

import json
from typing import Any

import pytest

from quire.cli.generate import Job, read_jobs
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams

BASE = SamplingParams(temperature=0.5, max_tokens=9)


def read(*records: dict[str, Any]) -> list[Job]:
    return read_jobs([json.dumps(record) + "\n" for record in records], BASE, "in.jsonl")


def test_text_token_ids_and_chat_are_prompts() -> None:
    messages = [{"role": "user", "content": "hi"}]
    jobs = read({"prompt": "a"}, {"prompt_token_ids": [1, 2]}, {"messages": messages})
    assert [(job.field, job.prompt) for job in jobs] == [
        ("prompt", "a"), ("prompt_token_ids", [1, 2]), ("messages", messages)
    ]


def test_empty_text_is_left_to_the_model() -> None:
    assert read({"prompt": ""})[0].prompt == ""


def test_line_overrides_the_command_line_and_leaves_the_rest() -> None:
    [job] = read({"prompt": "a", "max_tokens": 3, "stop": ["x"], "logit_bias": {"7": 1.5}})
    assert (job.params.max_tokens, job.params.temperature, job.params.stop) == (3, 0.5, ("x",))
    assert job.params.logit_bias == {7: 1.5}


def test_id_is_kept() -> None:
    assert [job.job_id for job in read({"prompt": "a", "id": "x"}, {"prompt": "a", "id": 5}, {"prompt": "a"})] == [
        "x", 5, None
    ]


def test_blank_lines_are_skipped_and_counted() -> None:
    jobs = read_jobs(['{"prompt": "a"}\n', "  \n", '{"prompt": "b"}'], BASE, "in.jsonl")
    assert [job.source for job in jobs] == ["in.jsonl, line 1", "in.jsonl, line 3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["a"]', "expected an object, got a list"),
        ("{}", "exactly one of prompt, prompt_token_ids, messages, has none"),
        ('{"prompt": "a", "messages": []}', "has prompt, messages"),
        ('{"prompt": 5}', "prompt must be a string, got a int"),
        ('{"prompt": null}', "prompt must be a string"),
        ('{"prompt_token_ids": "a"}', "prompt_token_ids must be a list of token ids"),
        ('{"prompt_token_ids": [-1]}', "token ids from 0"),
        ('{"prompt_token_ids": [true]}', "token ids from 0"),
        ('{"messages": []}', "messages must be a list of objects"),
        ('{"messages": ["hi"]}', "messages must be a list of objects"),
        ('{"prompt": "a", "temprature": 1}', "unknown field 'temprature'"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature must be"),
        ('{"prompt": "a", "n": 0}', "n must be"),
        ('{"prompt": "a", "id": [1]}', "id must be a string or an integer"),
    ],
)
def test_bad_line_is_refused_with_its_number(line: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        read_jobs(['{"prompt": "fine"}', line], BASE, "in.jsonl")
    assert str(caught.value).startswith("in.jsonl, line 2: ")
