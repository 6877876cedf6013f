"""Decoding in slices gives what the parser gives at once, and no slice is long."""

import json
import random
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from quire.server.api import json_decoding
from quire.server.api.json_decoding import JsonError, TooDeepError, TooManyValuesError, decoded
from quire.server.limits.fair_semaphore import run_at_once

NO_LIMIT = 10**9
NAMES = ("a", "b", "prompt", 'x"y', "c\\")
TEXTS = ("", '"', "\\", '\\\\"', "a,b", "[", "}", "🙂", "\n\t", "x" * 40)
JUNK = (b",", b'"', b"[", b"]", b"}", b"{", b"\\", b" ", b":", b"1", b"\xff", b"\x01", b" " * 30)


def value(rng: random.Random, depth: int) -> Any:  # noqa: ANN401 (JSON)
    kind = rng.random()
    if depth < 4 and kind < 0.25:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 5, 30]))]
    if depth < 4 and kind < 0.4:
        return {rng.choice([*NAMES, "", "é", "]{"]): value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 8]))}
    if kind < 0.55:
        return [rng.randrange(1000) for _ in range(rng.choice([0, 1, 50]))]
    return rng.choice([1, -2.5, True, None, *TEXTS])


def texts(seed: int, count: int) -> Any:  # noqa: ANN401 (an iterator)
    """Yield JSON, of which a good part has a fault."""
    rng = random.Random(seed)
    for _ in range(count):
        whole = {rng.choice(NAMES): value(rng, 1) for _ in range(rng.choice([0, 1, 2, 6]))}
        indent, is_ascii = rng.choice([None, None, 1]), rng.random() < 0.5
        raw = json.dumps(whole if rng.random() < 0.9 else value(rng, 0), ensure_ascii=is_ascii, indent=indent).encode()
        at, change = rng.randrange(len(raw) + 1), rng.random()
        if change < 0.2:
            raw = raw[:at] + raw[at + 1 :]
        elif change < 0.5:
            raw = raw[:at] + rng.choice(JUNK) + raw[at:]
        elif change < 0.6:
            raw = raw[:at] + raw[at : at + 3] * 2 + raw[at + 3 :]
        yield raw


def result(raw: bytes, wanted: Collection[str]) -> Any:  # noqa: ANN401 (JSON)
    try:
        return run_at_once(decoded(raw, wanted, NO_LIMIT, NO_LIMIT))
    except JsonError:
        return JsonError


@pytest.mark.parametrize("slice_bytes", [7, pytest.param(16, marks=pytest.mark.matrix), 64, 1000])
def test_slices_agree_with_the_parser(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("SLICE_BYTES", slice_bytes), ("SLICE_VALUES", 4), ("_CUT_BYTES", 5)):
        monkeypatch.setattr(json_decoding, name, size)
    num_valid = 0
    for raw in texts(slice_bytes, 1000):
        try:
            expected = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            assert result(raw, NAMES) is result(raw, ()) is JsonError, raw
            continue
        num_valid += 1
        found = result(raw, NAMES)
        if isinstance(expected, dict):
            known = {name: one if name in NAMES else None for name, one in expected.items()}
            assert (found, list(found)) == (known, list(known)), raw
            assert result(raw, ()) == dict.fromkeys(expected), raw
        else:
            assert type(found) is type(expected), raw
    assert 300 < num_valid < 900


def test_of_equal_names_the_last_counts() -> None:
    raw = b'{"a": 1, "\\u0061": 2, "b": 3, "b": [4]}'
    assert run_at_once(decoded(raw, ("a", "b"), NO_LIMIT, NO_LIMIT)) == {"a": 2, "b": [4]}


def test_errors_tell_the_place_in_the_whole_text() -> None:
    raw = b'{"a": "' + b"x" * 100_000 + b'", "prompt": [' + b"1," * 100_000 + b"x]}"
    with pytest.raises(JsonError, match=rf"\(byte {raw.index(b'x]')}\)"):
        run_at_once(decoded(raw, ("prompt",), NO_LIMIT, NO_LIMIT))


def test_depth_and_values_are_bounded() -> None:
    assert run_at_once(decoded(b'{"a": [[1, 2, null], "[[", {}]}', "a", 3, 6)) == {"a": [[1, 2, None], "[[", {}]}
    with pytest.raises(TooDeepError):
        run_at_once(decoded(b'{"a": [[1, 2, null], "[[", {}]}', "a", 2, 6))
    with pytest.raises(TooManyValuesError):
        run_at_once(decoded(b'{"a": [[1, 2, null], "[[", {}]}', "a", 3, 5))


def size(value: object) -> tuple[int, int]:
    """Return how deep a value is nested, and how many strings, lists and objects it has."""
    if not isinstance(value, list | dict):
        return 0, isinstance(value, str)
    names = len(value) if isinstance(value, dict) else 0
    inner = [size(each) for each in (value.values() if isinstance(value, dict) else value)]
    return 1 + max((depth for depth, _ in inner), default=0), 1 + names + sum(number for _, number in inner)


@pytest.mark.parametrize("slice_bytes", [7, 64, 1000])
def test_bounds_are_exact_wherever_slices_end(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_decoding, "SLICE_BYTES", slice_bytes)
    rng = random.Random(slice_bytes)
    for _ in range(300):
        whole = {f"{number}": value(rng, 1) for number in range(rng.choice([1, 2, 6]))}
        raw, (depth, num_values) = json.dumps(whole, ensure_ascii=rng.random() < 0.5).encode(), size(whole)
        assert run_at_once(decoded(raw, whole, depth, num_values)) == whole
        with pytest.raises(TooManyValuesError):
            run_at_once(decoded(raw, whole, depth, num_values - 1))
        with pytest.raises(TooDeepError):
            run_at_once(decoded(raw, whole, depth - 1, NO_LIMIT))


@pytest.mark.parametrize(
    ("value", "is_at_once"),
    [
        ('"' + "x" * 450_000 + '"', True),
        ('"' + '\\\\\\"' * 1_000 + "x" * 450_000 + '"', True),
        ('"' + "x" * json_decoding.STRING_BYTES + '"', False),
        ("[" + "1," * 100_000 + "1]", False),
        ("[" + '"x",' * 20_000 + "1]", False),
        ('"' + '\\"' * 100_000 + '"', False),
        ('["' + "\\\\" * 40 + '",' + "1," * 100_000 + '""]', False),  # numbers, which many backslashes would hide
    ],
    ids=["a long string", "some escapes", "too long", "numbers", "strings", "escaped quotes", "backslashes"],
)
def test_only_long_strings_are_decoded_at_once(value: str, is_at_once: bool) -> None:
    raw = f'{{"a": {value}, "b": [{{}}]}}'.encode()
    msgspec.json.decode(raw)
    found, depth = json_decoding.bounds_beside_strings(raw)
    assert not is_at_once or 2 <= depth <= 3
    assert (found <= json_decoding.SLICE_VALUES) == is_at_once
    assert not is_at_once or 0 <= found - size(msgspec.json.decode(raw))[1] < 1_100


def test_bounds_beside_strings_are_never_too_low() -> None:
    for raw in texts(3, 1000):
        try:
            depth, num_values = size(msgspec.json.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        most_values, most_depth = json_decoding.bounds_beside_strings(raw)
        assert most_values >= num_values, raw
        assert most_depth >= depth, raw


def test_depth_beside_strings_is_that_of_a_conversation() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "[{"}]}] * 200
    assert json_decoding.bounds_beside_strings(json.dumps({"messages": messages}).encode())[1] < 10


@pytest.mark.parametrize("raw", [b"{]", b'{"a": 1]', b"[}", b"[1}", b'{"a": [1}}'])
def test_brackets_of_two_kinds_are_no_json(raw: bytes) -> None:
    with pytest.raises(JsonError, match="malformed"):
        run_at_once(decoded(raw, ("a",), NO_LIMIT, NO_LIMIT))


def test_text_with_too_many_values_is_refused_before_it_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_decoding._Scan, "_scan_token", lambda *arguments: pytest.fail("scanned"))
    for raw in (b'{"a":[' + b"[]," * 10_000 + b"1]}", b'{"a":[' + b'"x",' * 10_000 + b"1]}", b'{"a":' * 10_000):
        with pytest.raises((TooManyValuesError, TooDeepError)):
            run_at_once(decoded(raw, "a", 64, 5_000))


def test_what_is_not_wanted_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(json_decoding, "loads", lambda text: seen.append(text) or msgspec.json.decode(text))
    raw = b'{"unknown": [' + b'{"x": 1},' * 5000 + b'{}], "prompt": "a"}'
    assert run_at_once(decoded(raw, ("prompt",), NO_LIMIT, NO_LIMIT)) == {"unknown": None, "prompt": "a"}
    assert [text.strip() for text in seen] == [b'"unknown"', b'"prompt"', b'"a"']
