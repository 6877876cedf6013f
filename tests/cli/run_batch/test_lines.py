"""Lines of batch files: what is read of them, and what is said of those that cannot be asked."""

import io
import json
import re
from typing import Any

import pytest

from quire.cli.run_batch.run_batch_command import BatchLine, answered, read_lines, refused
from quire.core.errors import InvalidRequestError

GOOD: dict[str, Any] = {
    "custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}
}  # fmt: skip


def read(*lines: bytes, max_line_bytes: int = 1000, max_lines: int = 10) -> list[BatchLine]:
    return list(read_lines(io.BytesIO(b"\n".join(lines)), max_line_bytes, max_lines))


def as_line(**changes: Any) -> bytes:  # noqa: ANN401 (JSON)
    return json.dumps({name: value for name, value in (GOOD | changes).items() if value is not None}).encode()


def test_lines_are_read_and_blank_ones_left_out() -> None:
    one, two = read(as_line(), b"", b"   ", as_line(custom_id="zwei \u00e4"))
    assert (one.number, one.custom_id, one.url, one.error) == (1, "one", "/v1/completions", None)
    assert json.loads(one.body) == GOOD["body"]
    assert (two.number, two.custom_id) == (4, "zwei \u00e4")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "line 1 is not JSON"),
        (b"\xff\xfe", "line 1 is not JSON"),
        (b"[" * 900, "line 1 is not JSON"),
        (b"[1]", "line 1 must be an object, got a list"),
        (as_line(custom_id=None), "custom_id must be a string of 1 to 512 characters, got None"),
        (as_line(custom_id=7), "custom_id must be a string"),
        (as_line(method="GET"), "line 1: method must be POST, got 'GET'"),
        (as_line(url="/v1/models"), "line 1: url must be one of /v1/completions, .*, got '/v1/models'"),
        (as_line(url=["/v1/completions"]), "line 1: url must be one of"),
        (as_line(body="x"), "line 1: body must be an object, got 'x'"),
        (as_line(body={"stream": True}), "line 1: stream must be false in a batch"),
    ],
)
def test_line_that_cannot_be_asked_is_told_with_its_number(line: bytes, told: str) -> None:
    bad, good = read(line, as_line())
    assert good.error is None
    assert re.search(told, bad.error or "")
    output = refused(bad)
    assert (output["response"], output["error"]["code"]) == (None, "invalid_line")
    assert output["error"]["message"] == bad.error


def test_long_lines_are_not_held_and_those_behind_them_are_read() -> None:
    lines = read(b"x" * 5000, as_line(), b"y" * 100, max_line_bytes=150)
    assert [line.error is None for line in lines] == [False, True, False]
    assert lines[0].error == "line 1 is longer than 150 bytes (max_line_bytes)"
    assert [line.number for line in lines] == [1, 2, 3]
    exact = as_line()
    assert [line.error for line in read(exact, exact, max_line_bytes=len(exact))] == [None, None]


def test_more_lines_than_allowed_end_the_run() -> None:
    with pytest.raises(InvalidRequestError, match=r"more than 2 lines \(max_lines\)"):
        read(as_line(), b"", as_line(), as_line(), max_lines=2)


def test_answers_carry_the_error_of_their_response() -> None:
    line = BatchLine(1, "one", "/v1/completions", b"{}")
    well = answered(line, 200, "cmpl-1", b'{"choices": []}')
    assert well | {"id": ""} == {
        "id": "", "custom_id": "one", "error": None,
        "response": {"status_code": 200, "request_id": "cmpl-1", "body": {"choices": []}},
    }  # fmt: skip
    badly = answered(line, 400, "r", b'{"error": {"message": "no", "code": null}}')
    assert badly["error"] == {"message": "no", "code": None} == badly["response"]["body"]["error"]
