"""Sessions over HTTP: what continues them, what is restored after a restart, and the key that each belongs to."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.json import encode

from quire.engine.options import EngineOptions
from quire.extension.isas import usable_isas
from support.http_app import ask, make_app
from support.openai_server import OpenAIServer, openai_server

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

SESSIONS, COMPLETIONS, CHAT = "/v1/sessions", "/v1/completions", "/v1/chat/completions"
TOKENS = [5 + i * 11 % 250 for i in range(75)]      # four blocks of 16, and eleven tokens
MESSAGES = [{"role": "user", "content": "What is water made of, and why does ice swim on it? " * 3}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
FIRST, SECOND = {"Authorization": "Bearer first"}, {"Authorization": "Bearer second"}


def options(demo_model: Path, directory: Path | None, **others: Any) -> EngineOptions:  # noqa: ANN401
    kept = {} if directory is None else {"kv_disk_dir": str(directory), "kv_disk_size": "64MiB"}
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 512, "num_kv_blocks": 256, "dtype": "float32"}
    return EngineOptions(model=str(demo_model), **settings | kept | others)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions") / "kv"


@pytest.fixture(scope="module")
def server(demo_model: Path, directory: Path) -> Iterator[OpenAIServer]:
    with openai_server(
        options(demo_model, directory), max_pinned_share=1.0, max_pinned_share_per_key=1.0, api_key=("first", "second"),
        max_saved_sessions_per_key=3, max_session_bytes=4000,
    ) as server:  # fmt: skip
        server.http.headers.update(FIRST)
        yield server
        for session in server.http.get(SESSIONS).json()["data"]:
            assert server.http.delete(f"{SESSIONS}/{session['id']}").status_code == 200
        server.wait_until(server.is_idle)


def answer(server: OpenAIServer, path: str = COMPLETIONS, **body: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the text and the logprobs of an answer."""
    choice = server.ask(path, **GREEDY | body)["choices"][0]
    logprobs = choice["logprobs"]["token_logprobs"] if path == COMPLETIONS else choice["message"]
    return choice.get("text"), logprobs


def cached(server: OpenAIServer, path: str = COMPLETIONS, **body: Any) -> int:  # noqa: ANN401
    return int(server.ask(path, **GREEDY | body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_completion_continues_a_session_with_the_bits_of_all_of_it(server: OpenAIServer) -> None:
    session = server.ask(SESSIONS, prompt=TOKENS)
    assert session["object"] == "session"
    assert session["num_tokens"] == 75
    assert session["num_messages"] is None
    whole = answer(server, prompt=[*TOKENS, 9, 8, 7])
    assert answer(server, prompt=[9, 8, 7], session_id=session["id"]) == whole
    assert cached(server, prompt=[9, 8, 7], session_id=session["id"]) >= 75
    assert answer(server, prompt="", session_id=session["id"]) == answer(server, prompt=TOKENS)


def test_text_behind_a_session_has_no_token_of_a_beginning(server: OpenAIServer) -> None:
    session = server.ask(SESSIONS, prompt=TOKENS)
    body = {"prompt": "abc", "echo": True, "session_id": session["id"], "return_token_ids": True}
    continued = server.ask(COMPLETIONS, **GREEDY | body)
    ids = server.ask("/tokenize", prompt="abc", add_special_tokens=False)["tokens"]
    assert continued["choices"][0]["prompt_token_ids"] == TOKENS + ids
    assert continued["usage"]["prompt_tokens"] == 75 + len(ids)


def test_chat_and_responses_send_the_new_messages_alone(server: OpenAIServer) -> None:
    session = server.ask(SESSIONS, messages=MESSAGES)
    assert session["num_messages"] == 1
    more = [{"role": "assistant", "content": "It is lighter."}, {"role": "user", "content": "Why?"}]
    body = {"logprobs": None}
    whole = answer(server, CHAT, messages=[*MESSAGES, *more], **body)
    assert answer(server, CHAT, messages=more, session_id=session["id"], **body) == whole
    extended = server.ask(f"{SESSIONS}/{session['id']}/extend", messages=more[:1])
    assert extended["num_messages"] == 2
    assert extended["id"] == session["id"]
    assert answer(server, CHAT, messages=more[1:], session_id=session["id"], **body) == whole
    asked = {"temperature": 0, "max_output_tokens": 16}
    items = [*MESSAGES, *({"role": each["role"], "content": each["content"]} for each in more)]
    all_of_it = server.ask("/v1/responses", input=items, **asked)["output"]
    rest = server.ask("/v1/responses", input="Why?", session_id=session["id"], **asked)["output"]
    assert [each["content"][0]["text"] for each in rest] == [each["content"][0]["text"] for each in all_of_it]


def test_session_of_tokens_has_no_messages_to_continue(server: OpenAIServer) -> None:
    session = server.ask(SESSIONS, prompt=TOKENS)
    status, error = server.refusal(CHAT, messages=MESSAGES, session_id=session["id"])
    assert (status, error["code"], error["param"]) == (400, "invalid_session", "session_id")
    assert "was not made of messages" in error["message"]


def test_session_is_made_of_an_answer_and_extended_by_one(server: OpenAIServer) -> None:
    first = server.ask(COMPLETIONS, prompt=TOKENS, **GREEDY | {"return_token_ids": True})
    session = server.ask(SESSIONS, answer_id=first["id"])
    assert session["num_tokens"] == 75 + 6
    second = server.ask(COMPLETIONS, prompt=[9, 9], session_id=session["id"], **GREEDY)
    extended = server.ask(f"{SESSIONS}/{session['id']}/extend", answer_id=second["id"])
    assert extended["num_tokens"] == 75 + 6 + 2 + 6
    status, error = server.refusal(f"{SESSIONS}/{session['id']}/extend", answer_id=first["id"])
    assert (status, error["param"]) == (400, "answer_id")
    status, error = server.refusal(SESSIONS, answer_id="cmpl-0")
    assert (status, error["code"], error["param"]) == (410, "answer_gone", "answer_id")


def test_fork_is_a_session_of_the_first_tokens(server: OpenAIServer) -> None:
    session = server.ask(SESSIONS, prompt=TOKENS)
    forked = server.ask(f"{SESSIONS}/{session['id']}/fork", at=40)
    assert forked["num_tokens"] == 40
    assert forked["id"] != session["id"]
    assert answer(server, prompt=[3], session_id=forked["id"]) == answer(server, prompt=[*TOKENS[:40], 3])
    status, error = server.refusal(f"{SESSIONS}/{session['id']}/fork", at=76)
    assert (status, error["param"]) == (400, "at")
    assert error["message"] == "at must be an integer from 1 to 75, got 76"
    assert server.http.delete(f"{SESSIONS}/{session['id']}").json()["deleted"] is True
    assert answer(server, prompt=[3], session_id=forked["id"]) == answer(server, prompt=[*TOKENS[:40], 3])


@pytest.mark.parametrize("act", ["get", "delete", "extend", "fork", "save", "continue"])
def test_session_belongs_to_the_key_that_made_it(server: OpenAIServer, act: str) -> None:
    session = server.ask(SESSIONS, prompt=TOKENS)
    path = f"{SESSIONS}/{session['id']}"
    requests: dict[str, tuple[str, str, Any]] = {
        "get": ("GET", path, None), "delete": ("DELETE", path, None), "fork": ("POST", f"{path}/fork", {}),
        "extend": ("POST", f"{path}/extend", {"prompt": "a"}), "save": ("POST", f"{path}/save", {"name": "a"}),
        "continue": ("POST", COMPLETIONS, {"prompt": "a", "session_id": session["id"]}),
    }  # fmt: skip
    method, url, body = requests[act]
    response = server.http.request(method, url, json=body, headers=SECOND)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "session_not_found"
    assert server.http.get(path).json()["id"] == session["id"]
    assert session["id"] not in [each["id"] for each in server.http.get(SESSIONS, headers=SECOND).json()["data"]]


@pytest.mark.parametrize(("body", "param"), [
    ({}, "prompt"), ({"prompt": "a", "restore": "b"}, "restore"), ({"prompt": []}, "prompt"), ({"prompt": 7}, "prompt"),
    ({"prompt": "a", "ttl": 0}, "ttl"), ({"prompt": "a", "model": "other"}, "model"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"), ({"prompt": [1] * 600}, "prompt"),
    ({"messages": [{"role": "user", "content": "long " * 1000}]}, "messages"),
    ({"restore": "../x"}, "name"), ({"restore": ".x"}, "name"), ({"restore": "x" * 65}, "name"),
])  # fmt: skip
def test_bad_body_names_the_field(server: OpenAIServer, body: dict[str, Any], param: str) -> None:
    before = server.http.get(SESSIONS).json()["data"]
    status, error = server.refusal(SESSIONS, **body)
    assert (status, error["param"]) == (404 if param == "model" else 400, param), error
    assert server.http.get(SESSIONS).json()["data"] == before


def test_salt_and_model_of_a_request_are_those_of_the_session(server: OpenAIServer) -> None:
    session = server.ask(SESSIONS, prompt=TOKENS, cache_salt="mine")
    assert cached(server, prompt=[4], session_id=session["id"]) >= 75
    assert cached(server, prompt=[4], session_id=session["id"], cache_salt="mine") >= 75
    status, error = server.refusal(COMPLETIONS, prompt=[4], session_id=session["id"], cache_salt="yours")
    assert (status, error["param"]) == (400, "cache_salt")


def test_saved_session_is_replaced_listed_bounded_and_deleted(server: OpenAIServer) -> None:
    session = server.ask(SESSIONS, prompt=TOKENS)
    path = f"{SESSIONS}/{session['id']}"
    for name in ("a", "b", "a", "C-9._"):
        saved = server.ask(f"{path}/save", name=name)
        assert (saved["name"], saved["num_tokens"]) == (name, 75)
        assert saved["bytes"] > 0
    listed = server.http.get(SESSIONS).json()["saved"]
    assert [each["name"] for each in listed] == ["C-9._", "a", "b"]
    assert listed[0]["num_tokens"] == 75
    assert server.http.get(SESSIONS, headers=SECOND).json()["saved"] == []
    status, error = server.refusal(f"{path}/save", name="d")
    assert (status, error["code"]) == (400, "session_limit")
    assert error["message"] == "3 sessions are saved already, and at most 3 may be (max_saved_sessions_per_key)"
    assert server.http.delete(f"{SESSIONS}/saved/b", headers=SECOND).status_code == 404
    for each in listed:
        assert server.http.delete(f"{SESSIONS}/saved/{each['name']}").status_code == 200
    status, error = server.refusal(SESSIONS, restore="a")
    assert (status, error["code"], error["param"]) == (404, "session_not_found", "name")


@pytest.mark.parametrize("scope", ["", "_per_key"], ids=["all", "key"])
def test_saved_sessions_are_bounded(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    """A session that is saved again counts once, and reaches each bound on its own without passing it."""
    num_bytes = server.service.client.ready.kv_bytes_per_token * len(TOKENS)
    path = f"{SESSIONS}/{server.ask(SESSIONS, prompt=TOKENS)['id']}"
    own = server.service.options
    for name, most in ((f"max_saved_sessions{scope}", 1), (f"max_saved_session_bytes{scope}", num_bytes)):
        monkeypatch.setattr(server.service, "options", replace(own, **{name: most}))
        for _ in range(2):
            server.ask(f"{path}/save", name="first")
        status, error = server.refusal(f"{path}/save", name="second")
        assert (status, error["code"]) == (400, "session_limit")
        assert f"at most {most} " in error["message"]
        assert error["message"].endswith(f"({name})")
        assert server.http.delete(f"{SESSIONS}/saved/first").status_code == 200


def test_saves_at_once_are_bounded(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them copies blocks between steps: the bound is reached, not passed, and free again afterwards."""
    monkeypatch.setattr(server.service, "options", replace(server.service.options, max_session_saves=2))
    path = f"{SESSIONS}/{server.ask(SESSIONS, prompt=TOKENS)['id']}/save"
    with ThreadPoolExecutor() as threads:
        with server.held():     # no save ends
            saves = [threads.submit(server.http.post, path, json={"name": name}) for name in "abc"]
            server.wait_until(lambda: any(each.done() for each in saves))
        answers = sorted((each.result() for each in saves), key=lambda each: each.status_code)
    assert [each.status_code for each in answers] == [200, 200, 429]
    error = answers[2].json()["error"]
    assert error["code"] == "server_overloaded"
    assert error["message"].endswith("at most 2 may be at once (max_session_saves)")
    assert answers[2].headers["retry-after"] == "1"
    for name in "abc":
        assert server.ask(path, name=name)["name"] == name
        assert server.http.delete(f"{SESSIONS}/saved/{name}").status_code == 200


def test_messages_of_a_session_are_bounded(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "short"}]
    num_bytes = len(encode(messages))
    monkeypatch.setattr(server.service, "options", replace(server.service.options, max_session_bytes=num_bytes))
    server.ask(SESSIONS, messages=messages)
    status, error = server.refusal(SESSIONS, messages=[{"role": "user", "content": "short."}])
    assert (status, error["param"]) == (400, "messages")
    told = f"the messages of the session take {num_bytes + 1} bytes, at most {num_bytes} (max_session_bytes)"
    assert error["message"] == told


@pytest.fixture(scope="module")
def saved(demo_model: Path, directory: Path, server: OpenAIServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of a directory with two sessions, which no tier has blocks of beside them."""
    plain = server.ask(SESSIONS, prompt=TOKENS)
    salted = server.ask(SESSIONS, messages=MESSAGES, cache_salt="mine")
    server.ask(f"{SESSIONS}/{plain['id']}/save", name="plain")
    server.ask(f"{SESSIONS}/{salted['id']}/save", name="salted")
    return copied(directory, tmp_path_factory.mktemp("saved") / "kv")


def copied(directory: Path, copy: Path) -> Path:
    """Copy the saved sessions of a directory alone: a tier has their blocks as well."""
    shutil.copytree(directory / "sessions", copy / "sessions")
    copy.chmod(0o700)
    return copy


def test_restart_restores_a_session_from_its_own_blocks(demo_model: Path, saved: Path, server: OpenAIServer) -> None:
    whole = answer(server, prompt=[*TOKENS, 9, 8, 7])
    more = [{"role": "user", "content": "Why?"}]
    chat = answer(server, CHAT, messages=[*MESSAGES, *more], logprobs=None, cache_salt="another")
    with openai_server(
        options(demo_model, saved), max_pinned_share=1.0, max_pinned_share_per_key=1.0, api_key=("new", "first"),
    ) as restarted:  # fmt: skip
        assert restarted.http.get(SESSIONS, headers={"Authorization": "Bearer new"}).json()["saved"] == []
        restarted.http.headers.update(FIRST)        # the second key now: it is the key that counts, not its number
        session = restarted.ask(SESSIONS, restore="plain")
        assert (session["num_tokens"], session["num_disk_tokens"]) == (75, 64)
        assert answer(restarted, prompt=[9, 8, 7], session_id=session["id"]) == whole
        for salt in (None, "yours"):
            status, error = restarted.refusal(SESSIONS, restore="salted", cache_salt=salt)
            assert (status, error["code"]) == (409, "session_incompatible")
            assert "another cache_salt" in error["message"]
        session = restarted.ask(SESSIONS, restore="salted", cache_salt="mine")
        assert session["num_messages"] == 1
        assert session["num_disk_tokens"] >= 16
        body = {"messages": more, "session_id": session["id"], "logprobs": None}
        assert answer(restarted, CHAT, **body) == chat
        response = restarted.http.post(SESSIONS, json={"restore": "plain"}, headers={"Authorization": "Bearer new"})
        assert response.status_code == 404
        for each in restarted.http.get(SESSIONS).json()["data"]:
            restarted.http.delete(f"{SESSIONS}/{each['id']}")
        restarted.wait_until(restarted.is_idle)


def test_slots_speak_llama_cpps_json(demo_model: Path, tmp_path: Path) -> None:
    engine = options(demo_model, tmp_path / "kv")
    with openai_server(engine, max_pinned_share=1.0) as server:
        session = server.ask(SESSIONS, prompt=TOKENS)
        assert session["id_slot"] == 0
        assert server.ask(SESSIONS, prompt=[8, 9])["id_slot"] == 1
        saved = server.ask("/slots/0?action=save", filename="slot.bin")
        assert saved.keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
        assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "slot.bin", 75)
        assert saved["timings"]["save_ms"] > 0
        whole = answer(server, prompt=[*TOKENS, 9, 8, 7])
        assert server.ask("/slots/0?action=erase") == {"id_slot": 0, "n_erased": 75}
        assert server.ask(SESSIONS, prompt=[7, 7])["id_slot"] == 0, "the lowest that is free"
        for slot, action, status, param in (
            (5, "save", 404, "id_slot"), (64, "save", 400, "id_slot"), ("x", "save", 400, "id_slot"),
            (0, "move", 400, "action"), (0, "restore", 400, "filename"),
        ):  # fmt: skip
            body = {} if param == "filename" else {"filename": "a"}
            assert server.refusal(f"/slots/{slot}?action={action}", **body)[1]["param"] == param
            assert server.http.post(f"/slots/{slot}?action={action}", json=body).status_code == status
        assert server.refusal("/slots/0?action=restore", filename="b")[0] == 404
    with openai_server(engine, max_pinned_share=1.0) as restarted:
        restored = restarted.ask("/slots/3?action=restore", filename="slot.bin")
        assert restored.keys() == {"id_slot", "filename", "n_restored", "n_read", "timings"}
        assert (restored["id_slot"], restored["n_restored"]) == (3, 75)
        assert restored["n_read"] > 0
        (session,) = restarted.http.get(SESSIONS).json()["data"]
        assert session["id_slot"] == 3
        assert answer(restarted, prompt=[9, 8, 7], session_id=session["id"]) == whole
        restarted.ask("/slots/3?action=restore", filename="slot.bin")
        (again,) = restarted.http.get(SESSIONS).json()["data"]
        assert again["id"] != session["id"]
        assert restarted.ask("/slots/3?action=erase")["n_erased"] == 75
        restarted.wait_until(restarted.is_idle)


def test_session_of_another_engine_is_refused_by_the_field_that_differs(demo_model: Path, saved: Path) -> None:
    with openai_server(options(demo_model, saved, dtype="bfloat16"), api_key=("first",)) as other:
        other.http.headers.update(FIRST)
        status, error = other.refusal(SESSIONS, restore="plain")
    assert (status, error["code"]) == (409, "session_incompatible")
    assert "weights '" in error["message"]


def test_spoilt_session_is_computed_or_refused_and_never_wrong(
    demo_model: Path, saved: Path, server: OpenAIServer, tmp_path: Path
) -> None:
    whole = answer(server, prompt=[*TOKENS, 9, 8, 7])
    copy = copied(saved, tmp_path / "kv")
    (plain,) = (copy / "sessions").glob("*/plain")
    blocks = plain / "blocks"
    size = blocks.stat().st_size
    with blocks.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(byte ^ 255 for byte in b"\0" * 9))
    (salted,) = (copy / "sessions").glob("*/salted")
    header = salted / "session.json"
    header.write_bytes(header.read_bytes()[:-2] + b"!}")
    with openai_server(options(demo_model, copy), max_pinned_share=1.0, api_key=("first",)) as restarted:
        restarted.http.headers.update(FIRST)
        session = restarted.ask(SESSIONS, restore="plain")
        assert session["num_disk_tokens"] == 32, "the third block of four is spoilt"
        assert answer(restarted, prompt=[9, 8, 7], session_id=session["id"]) == whole
        status, error = restarted.refusal(SESSIONS, restore="salted", cache_salt="mine")
        assert (status, error["code"]) == (409, "session_unreadable")


def test_server_without_a_folder_has_sessions_and_saves_none(demo_model: Path) -> None:
    with openai_server(options(demo_model, None), max_pinned_share=1.0) as server:
        session = server.ask(SESSIONS, prompt=TOKENS)
        status, error = server.refusal(f"{SESSIONS}/{session['id']}/save", name="a")
        assert (status, error["code"]) == (400, "unsupported_parameter")
        assert "kv_disk_dir" in error["message"]
        assert server.http.get(SESSIONS).json()["saved"] == []


def test_session_ends_with_its_pin(server: OpenAIServer) -> None:
    before = {each["id"] for each in server.http.get("/v1/prefixes").json()["data"]}
    session = server.ask(SESSIONS, prompt=[7] * 40)
    (prefix,) = {each["id"] for each in server.http.get("/v1/prefixes").json()["data"]} - before
    assert server.http.delete(f"/v1/prefixes/{prefix}").status_code == 200
    assert server.http.get(f"{SESSIONS}/{session['id']}").status_code == 404


def test_routes_are_off_where_nothing_can_be_pinned() -> None:
    response: httpx.Response = ask(make_app(max_pinned_prefixes=0), "POST", SESSIONS, json={"prompt": "a"})
    assert response.status_code == 404
