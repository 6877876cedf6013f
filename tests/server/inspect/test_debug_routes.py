"""/debug: only with the flag, only with a key where there are keys; JSON of the cache, and pages that obey."""

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from quire.core.block_map import MAX_BLOCKS_SHOWN
from quire.engine.options import EngineOptions
from quire.server.inspect.replay import MAX_OPERATIONS
from support.http_app import ask, make_app
from support.openai_server import Json, OpenAIServer, openai_server
from support.server import wait_until

PAGES = ("/debug/blocks", "/debug/blocks/playground")
NUM_BLOCKS, NUM_SWAP_BLOCKS = 160, 400


def error_of(response: httpx.Response) -> Json:
    error: Json = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- readers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["/debug/kv", "/debug/top", *PAGES, "/debug/blocks/replay"])
def test_without_the_flag_there_is_nothing(url: str) -> None:
    response = ask(make_app(), "POST" if url.endswith("replay") else "GET", url)
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")


def basic(password: str, user: str = "me") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.mark.parametrize("url", ["/debug/kv", "/debug/top", *PAGES])
def test_every_route_needs_a_key_and_asks_a_browser_for_it(url: str) -> None:
    response = ask(make_app(api_key=("key",), enable_debug=True), "GET", url)
    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
    bearer, challenge = response.headers["WWW-Authenticate"].split(", ", 1)
    assert bearer == "Bearer"
    assert challenge.startswith('Basic realm="')


@pytest.mark.parametrize("header", [{"Authorization": "Bearer ké:y"}, basic("ké:y"), basic("ké:y", user="")])
def test_key_opens_a_page_as_a_header_and_from_a_dialog(header: dict[str, str]) -> None:
    app = make_app(api_key=("other", "ké:y"), enable_debug=True)
    headers = {name: value.encode() for name, value in header.items()}
    assert ask(app, "GET", PAGES[0], headers=headers).status_code == 200


@pytest.mark.parametrize("header", ["Basic", "Basic key", "Basic a2V5", "Basic OmtleQ", "Basic " + "=" * 8, "Digest a"])
def test_anything_else_in_a_dialogs_header_does_not(header: str) -> None:
    app = make_app(api_key=("key",), enable_debug=True)
    assert ask(app, "GET", PAGES[0], headers={"Authorization": header}).status_code == 401


@pytest.mark.parametrize(
    ("url", "enabled"),
    [("/version", True), ("/metrics", True), ("/debug", True), ("/%64ebug/kv", True), ("/debug/kv", False)],
)
def test_a_dialogs_header_opens_nothing_else(url: str, enabled: bool) -> None:
    response = ask(make_app(api_key=("key",), enable_debug=enabled), "GET", url, headers=basic("key"))
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"


# --- the playground ---------------------------------------------------------------------------------------------------


def play(operations: object) -> httpx.Response:
    return ask(make_app(enable_debug=True), "POST", "/debug/blocks/replay", json={"operations": operations})


def test_operations_are_replayed() -> None:
    steps = [{"op": "new"}, {"op": "append", "sequence": 0, "count": 20}, {"op": "fork", "sequence": 0}]
    state = play([*steps, {"op": "write", "sequence": 1}, {"op": "free", "sequence": 0}]).json()
    assert state["sequences"] == [[1, 21, [0, 2]]]
    assert state["outcomes"][3:] == [
        "block 1 was shared: copied to 2 before the write", "let go of 2 blocks; 1 of them are free now"
    ]  # fmt: skip
    assert state["stats"] | {"free_blocks": 62, "used_blocks": 2, "copied_blocks": 1} == state["stats"]
    assert state["blocks"][2] == {
        "block": 2, "state": "used", "tier": "kv", "ref_count": 1, "owners": [{"holder": 1, "index": 1, "filled": 5}]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("operations", "param"),
    [
        ("new", "operations"),
        ([{"op": "jump"}], "operations[0].op"),
        ([{"op": "new"}, {}], "operations[1]"),
        ([7], "operations[0]"),
        ([{"op": "new", "size": 1}], "operations[0]"),
        ([{"op": "append", "sequence": 0}], "operations[0]"),
        ([{"op": "append", "sequence": "0", "count": 1}], "operations[0].sequence"),
        ([{"op": "new"}, {"op": "append", "sequence": 0, "count": 0}], "operations[1].count"),
        ([{"op": "new"}, {"op": "append", "sequence": 0, "count": 1025}], "operations[1].count"),
        ([{"op": "free", "sequence": 0}], "operations[0]"),
        ([{"op": "fork", "sequence": 10**30}], "operations[0].sequence"),
        ([{"op": "new"}] * (MAX_OPERATIONS + 1), "operations"),
    ],
)
def test_bad_operations_are_refused_by_name(operations: object, param: str) -> None:
    response = play(operations)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert param in error_of(response)["message"]


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "invalid_json"), (b"{", "invalid_json"), (b"\xff", "invalid_json"), (b"[" * 100_000, None),
     (b'{"\xff": 1}', "invalid_json"), (b"[]", None), (b"{}", None), (b'{"operations": [], "more": 1}', None),
     (b'{"operations": [' + b'{"op": "new"},' * 100_000 + b'{"op": "new"}]}', None)],
    ids=["empty", "cut", "no text", "deep", "no Unicode", "a list", "nothing", "unknown field", "large"],
)  # fmt: skip
def test_bad_bodies_are_refused(content: bytes, code: str | None) -> None:
    response = ask(make_app(enable_debug=True), "POST", "/debug/blocks/replay", content=content)
    assert (response.status_code, error_of(response)["code"]) == (400, code)


def test_replay_is_only_posted() -> None:
    response = ask(make_app(enable_debug=True), "GET", "/debug/blocks/replay")
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")


# --- the cache of an engine -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[OpenAIServer]:
    engine = EngineOptions(
        str(demo_model), num_kv_blocks=NUM_BLOCKS, num_swap_blocks=NUM_SWAP_BLOCKS, max_model_len=1024,
        preemption_mode="swap",
    )  # fmt: skip
    with openai_server(engine, enable_debug=True, api_key=("first", "second")) as running:
        running.http.headers["Authorization"] = "Bearer second"
        yield running


def kv(server: OpenAIServer, **params: object) -> Json:
    response = server.http.get("/debug/kv", params=params)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text
    return json.loads(response.text)  # type: ignore[no-any-return]


def map_while_asking(server: OpenAIServer, body: dict[str, Any], num_holders: int, tier: str = "kv") -> dict[str, Any]:
    """Ask the same again and again, however fast that is answered, until a map has caught enough of its sequences."""
    maps, is_seen = list[dict[str, Any]](), threading.Event()

    def keep_asking() -> None:
        while not is_seen.is_set():
            server.http.post("/v1/completions", json=body)

    def has_caught_it() -> bool:
        maps.append(kv(server, count=MAX_BLOCKS_SHOWN, tier=tier))
        return len(maps[-1]["holders"]) >= num_holders

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        wait_until(has_caught_it)
    finally:
        is_seen.set()
        asking.join()
    return maps[-1]


def test_map_shows_running_requests_and_what_they_leave(server: OpenAIServer) -> None:
    body = {"prompt": list(range(5, 45)), "n": 3, "max_tokens": 600, "ignore_eos": True, "cache_salt": "<b>"}
    server.wait_until(server.is_idle)
    shown = map_while_asking(server, body, num_holders=3)
    assert (shown["first"], len(shown["blocks"])) == (0, NUM_BLOCKS)
    states = [entry["state"] for entry in shown["blocks"]]
    assert states.count("used") == shown["stats"]["used_blocks"] >= 3
    branches = [(holder["kind"], holder["branch"]) for holder in shown["holders"]]
    assert branches == [("sequence", 0), ("sequence", 1), ("sequence", 2)]
    (owner,) = {holder["owner"] for holder in shown["holders"]}
    assert owner.startswith("key-2 salt-")
    assert shown["stats"]["blocks_by_owner"] == {owner: states.count("used")}
    assert {entry["tier"] for entry in shown["blocks"]} == {"kv"}
    server.wait_until(server.is_idle)
    assert f'quire:kv_blocks_by_owner{{engine="0",owner="{owner}"}} 0.0' in server.http.get("/metrics").text
    after = kv(server)
    assert {entry["state"] for entry in after["blocks"]} == {"cached", "free"}
    assert after["holders"] == []


def test_steps_are_shown_with_rates_and_shares(server: OpenAIServer) -> None:
    body = {"prompt": list(range(5, 45)), "max_tokens": 40, "ignore_eos": True}
    before = server.http.get("/debug/top").json()["next"]
    assert server.http.post("/v1/completions", json=body).status_code == 200
    shown = server.http.get("/debug/top", params={"since": before}).json()
    assert shown.keys() == {"now", "next", "engines"}
    (engine,) = shown["engines"]
    steps = engine["steps"]
    num_steps = shown["next"] - before
    assert num_steps == 40
    assert {name: len(values) for name, values in steps.items()} == dict.fromkeys(steps, num_steps)
    assert steps["number"] == list(range(before, before + num_steps))
    assert (sum(steps["outputs"]), sum(steps["tokens"]) + sum(steps["hits"])) == (40, 79)
    assert steps["kind"][-1] == "decode"
    assert all(start < shown["now"] for start in steps["start"])
    assert {sum(blocks) for blocks in zip(steps["free"], steps["cached"], steps["used"], strict=True)} == {NUM_BLOCKS}
    assert sum(engine["blocks"][state] for state in ("free", "cached", "used")) == NUM_BLOCKS
    assert engine["rates"].keys() == {"1", "10", "60"}
    assert engine["served"] is None         # without fair shares
    wrong = server.http.get("/debug/top", params={"since": "-1"})
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "since")


def test_steps_are_the_operators(demo_model: Path) -> None:
    engine = EngineOptions(str(demo_model), num_kv_blocks=NUM_BLOCKS, max_model_len=1024, scheduling_policy="fair")
    with openai_server(engine, enable_debug=True, api_key=("client",), operator_api_key="operator") as server:
        server.http.headers["Authorization"] = "Bearer client"
        refused = server.http.get("/debug/top")
        assert (refused.status_code, error_of(refused)["code"]) == (403, "operator_only")
        body = {"prompt": list(range(5, 45)), "max_tokens": 900, "ignore_eos": True}
        operator = {"Authorization": "Bearer operator"}
        served = list[dict[str, float]]()

        def is_served() -> bool:
            run_step()
            served.append(server.http.get("/debug/top", headers=operator).json()["engines"][0]["served"])
            return bool(served[-1])

        asking = threading.Thread(target=lambda: server.http.post("/v1/completions", json=body))
        with server.single_steps() as run_step:     # else the request might be over before we have looked
            asking.start()
            server.wait_until(lambda: server.service.client.num_queued == 1)
            wait_until(is_served)
        asking.join()
    assert served[-1].keys() == {"key-1"}
    assert served[-1]["key-1"] >= 40


def test_map_shows_swapped_requests(server: OpenAIServer) -> None:
    prompts = [[5 + number] * 600 for number in range(4)]  # three of them, and their answers, fill the cache
    body = {"prompt": prompts, "n": 4, "max_tokens": 120, "ignore_eos": True}
    server.wait_until(server.is_idle)
    shown = map_while_asking(server, body, num_holders=4, tier="swap")
    used = [entry for entry in shown["blocks"] if entry["state"] == "used"]
    assert (shown["first"], len(shown["blocks"])) == (0, NUM_SWAP_BLOCKS)
    assert len(used) == shown["stats"]["swap_used_blocks"] > 0
    assert [holder["branch"] for holder in shown["holders"]] == [0, 1, 2, 3] * (len(shown["holders"]) // 4)
    for away in shown["holders"]:
        shares = [owner for entry in used for owner in entry["owners"] if owner["holder"] == away["holder"]]
        assert sorted(owner["index"] for owner in shares) == list(range(len(shares)))
        assert sum(owner["filled"] for owner in shares) == away["num_tokens"] > 600
        assert all(entry["ref_count"] == 4 for entry in used if entry["owners"][0]["index"] < 37)
    assert {entry["tier"] for entry in shown["blocks"]} == {"swap"}


def test_without_a_swap_space_there_is_no_map_of_it(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = msgspec.structs.replace(server.service.client.ready, num_swap_blocks=0)
    monkeypatch.setattr(server.service.client, "ready", ready)
    response = server.http.get("/debug/kv", params={"tier": "swap"})
    assert (response.status_code, error_of(response)["param"]) == (400, "tier")
    assert "'swap'" in error_of(response)["message"]


def test_map_is_a_window(server: OpenAIServer) -> None:
    assert [entry["block"] for entry in kv(server, first=3, count=4)["blocks"]] == [3, 4, 5, 6]
    assert [entry["block"] for entry in kv(server, first=NUM_BLOCKS - 1)["blocks"]] == [NUM_BLOCKS - 1]


@pytest.mark.parametrize(
    ("params", "param", "limit"),
    [
        ({"first": "-1"}, "first", "159"),
        ({"first": str(NUM_BLOCKS)}, "first", "159"),
        ({"first": "9" * 5000}, "first", "159"),
        ({"first": "１"}, "first", "159"),
        ({"count": "0"}, "count", "4096"),
        ({"count": "4097"}, "count", "4096"),
        ({"count": ""}, "count", "4096"),
        ({"count": "1.0"}, "count", "4096"),
        ({"tier": "disk"}, "tier", "kv, or swap where there is a swap space"),
        ({"tier": "swap", "first": str(NUM_SWAP_BLOCKS)}, "first", "399"),
    ],
)
def test_windows_that_there_are_not_are_refused(server: OpenAIServer, params: Json, param: str, limit: str) -> None:
    response = server.http.get("/debug/kv", params=params)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert limit in error_of(response)["message"]


def test_engine_that_does_not_answer_in_time_is_told(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: Any) -> None:  # noqa: ANN401
        raise TimeoutError

    monkeypatch.setattr(server.service.client, "block_map", late)
    response = server.http.get("/debug/kv")
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unhealthy")
    assert int(response.headers["Retry-After"]) >= 1


def test_map_of_a_dead_engine_is_an_error(demo_model: Path) -> None:
    with openai_server(EngineOptions(str(demo_model), num_kv_blocks=16), enable_debug=True) as server:
        server.child.process.kill()
        server.wait_until(lambda: not server.service.client.is_alive)
        response = server.http.get("/debug/kv")
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unhealthy")
