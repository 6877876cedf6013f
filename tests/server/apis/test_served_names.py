"""LoRA adapters over HTTP: names in every route, loading and unloading while requests run, and what is refused."""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.server.adapter_names import AdapterModule, parse_modules
from quire.server.options import ServerOptions
from support.http_app import ask, make_app
from support.openai_server import NAME, OpenAIServer, openai_server
from support.peft_folders import write_adapter
from support.server import running_server, wait_until

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PROMPT = [5, 6, 7, 8] * 10


@pytest.fixture(scope="module")
def root(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write adapters of the demo model below one folder."""
    root = tmp_path_factory.mktemp("root")
    for number, name in enumerate("abc"):
        write_adapter(root / name, demo_model, number, size=3.0)
    write_adapter(root / "large", demo_model, rank=64)
    (root.parent / "outside").mkdir(exist_ok=True)
    write_adapter(root.parent / "outside", demo_model)
    (root / "link").symlink_to(root.parent / "outside")
    (root / "file").write_text("x")
    return root


@pytest.fixture(scope="module")
def module_server(demo_model: Path, root: Path) -> Iterator[OpenAIServer]:
    options = EngineOptions(model=str(demo_model), enable_lora=True, max_loras=1, max_model_len=1024, num_kv_blocks=512)
    with openai_server(options, allow_runtime_lora=True, lora_root=str(root)) as server:
        yield server


@pytest.fixture
def server(module_server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Return the server; no adapter is left."""
    yield module_server
    for name in names(module_server):
        if name != NAME:
            assert module_server.http.post(UNLOAD, json={"lora_name": name}).status_code == 200
    module_server.wait_until(module_server.is_idle)


def names(server: OpenAIServer) -> list[str]:
    return [model["id"] for model in server.http.get("/v1/models").json()["data"]]


def load(server: OpenAIServer, name: str, path: str | None = None) -> None:
    response = server.http.post(LOAD, json={"lora_name": name, "lora_path": path or name})
    assert response.status_code == 200, response.text
    assert response.text == f"Success: LoRA adapter '{name}' added successfully."


def text(server: OpenAIServer, model: str) -> str:
    return str(server.ask("/v1/completions", model=model, prompt=PROMPT, **GREEDY)["choices"][0]["text"])


def test_adapters_are_models_of_every_route(server: OpenAIServer, root: Path) -> None:
    load(server, "a")
    load(server, "b")
    assert names(server) == [NAME, "a", "b"]
    described = server.http.get("/v1/models/a").json()
    assert (described["parent"], described["root"]) == (NAME, str(root / "a"))
    assert len({text(server, name) for name in (NAME, "a", "b")}) == 3
    messages = [{"role": "user", "content": "hi"}]
    chats = [server.ask("/v1/chat/completions", model=name, messages=messages, **GREEDY) for name in (NAME, "a", "b")]
    assert [chat["model"] for chat in chats] == [NAME, "a", "b"]
    assert len({chat["choices"][0]["message"]["content"] for chat in chats}) == 3
    body = {"max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert server.ask("/v1/responses", model="a", input="hi", **body)["model"] == "a"
    assert server.ask("/v1/messages", model="b", messages=messages, max_tokens=4)["model"] == "b"
    pinned = server.ask("/v1/prefixes", model="a", prompt=PROMPT)
    cached = [
        server.ask("/v1/completions", model=name, prompt=[*PROMPT, 9], **GREEDY)["usage"]["prompt_tokens_details"]
        for name in ("a", "b")
    ]
    assert [each["cached_tokens"] >= 32 for each in cached] == [True, True], "b has computed it before"
    assert server.http.delete(f"/v1/prefixes/{pinned['id']}").status_code == 200


def test_adapter_is_unloaded_while_a_request_runs(server: OpenAIServer) -> None:
    """The stream goes on with the adapter; new requests do not know its name."""
    load(server, "a")
    long = {"prompt": PROMPT, "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    expected = server.ask("/v1/completions", model="a", **long)["choices"][0]["text"]
    with server.http.stream("POST", "/v1/completions", json=long | {"model": "a", "stream": True}) as response:
        lines = response.iter_lines()
        first = next(lines)
        assert server.http.post(UNLOAD, json={"lora_name": "a"}).status_code == 200
        load(server, "c")
        text(server, NAME)
        rest = [first, *lines]
    import json

    events = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    status, error = server.refusal("/v1/completions", model="a", prompt=PROMPT)
    assert (status, error["code"]) == (404, "model_not_found")
    assert "a" not in error["message"].split("this server has ")[1].split(", ")


def test_metrics_name_the_adapters_of_requests(server: OpenAIServer) -> None:
    load(server, "a")
    load(server, "b")
    long = {"prompt": PROMPT, "n": 8, "max_tokens": 900, "ignore_eos": True, "stream": True}

    def page_with(running: str, waiting: str, before_each: Callable[[], None] = lambda: None) -> str:
        """Return the first page with these adapters."""
        expected = {"running_lora_adapters": running, "waiting_lora_adapters": waiting}
        expected |= {"model_name": NAME, "engine": "0", "max_lora": "1"}
        pages = list[str]()

        def is_there() -> bool:
            before_each()
            pages.append(server.http.get("/metrics").text)
            (sample,) = (
                sample
                for family in text_string_to_metric_families(pages[-1])
                for sample in family.samples
                if sample.name == "vllm:lora_requests_info"
            )
            assert 0 <= time.time() - sample.value < 3600
            return sample.labels == expected

        wait_until(is_there)
        return pages[-1]

    with ThreadPoolExecutor(1) as pool:
        with ExitStack() as streams, server.single_steps() as run_step:
            streams.enter_context(server.http.stream("POST", "/v1/completions", json=long | {"model": "a"}))
            server.wait_until(lambda: server.service.client.num_queued == 1)
            run_step()
            waiting = pool.submit(text, server, "b")
            server.wait_until(lambda: server.service.client.num_queued == 1)
            page = page_with("a", "b", run_step)
            assert 'quire:lora_adapters{engine="0",state="running"} 1.0' in page
            assert 'quire:lora_adapters{engine="0",state="waiting"} 1.0' in page
        assert waiting.result()
    page = page_with("", "")
    assert 'quire:lora_adapters{engine="0",state="running"} 0.0' in page


def test_adapter_is_replaced_in_place_and_shares_no_prefix_with_the_old_one(server: OpenAIServer) -> None:
    load(server, "x", "a")
    old = text(server, "x")
    answer = server.http.post(LOAD, json={"lora_name": "x", "lora_path": "b", "load_inplace": True})
    assert answer.status_code == 200
    new = text(server, "x")
    load(server, "y", "b")
    assert new == text(server, "y")
    assert new != old
    assert names(server) == [NAME, "x", "y"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "x", "lora_path": "../outside"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "a/../../outside"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "link"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "."}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "file"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "nothing"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": 5}, 400, "lora_path"),
        ({"lora_name": "x" * 300, "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "x\n", "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": NAME, "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "x", "lora_path": "large"}, 400, "lora_path"),
        ({"lora_path": "a"}, 400, "lora_name"),
    ],
)
def test_adapters_that_cannot_be_loaded_are_refused(
    body: dict[str, object], status: int, param: str, server: OpenAIServer
) -> None:
    found, error = server.refusal(LOAD, **body)
    assert (found, error["param"]) == (status, param), error
    assert names(server) == [NAME]


def test_names_are_taken_once_and_unknown_ones_are_not_unloaded(server: OpenAIServer) -> None:
    load(server, "a")
    assert server.refusal(LOAD, lora_name="a", lora_path="b")[1]["param"] == "lora_name"
    assert server.refusal(UNLOAD, lora_name="b")[0] == 404
    assert server.refusal(UNLOAD, lora_name=NAME)[0] == 404


def test_adapter_that_is_gone_fails_its_requests_alone(server: OpenAIServer, root: Path) -> None:
    shutil.copytree(root / "a", root / "gone")
    load(server, "gone")
    shutil.rmtree(root / "gone")
    load(server, "b")
    text(server, "b")                                   # one adapter fits in memory
    status, error = server.refusal("/v1/completions", model="gone", prompt=PROMPT, **GREEDY)
    assert (status, error["param"]) == (400, "model"), error
    assert text(server, "b")


def test_routes_are_there_when_allowed_and_for_the_operator_alone_if_there_is_one(tmp_path: Path) -> None:
    body = {"lora_name": "a", "lora_path": "a"}
    assert ask(make_app(), "POST", LOAD, json=body).status_code == 404
    app = make_app(
        allow_runtime_lora=True, lora_root=str(tmp_path), api_key=("key",), operator_api_key="root",
    )  # fmt: skip
    key = {"Authorization": "Bearer key"}
    assert ask(app, "POST", UNLOAD, json=body, headers=key).status_code == 403
    assert ask(app, "POST", UNLOAD, json=body, headers={"Authorization": "Bearer root"}).status_code == 404


def test_modules_are_pairs_or_objects() -> None:
    given = ("sql=a/b=c", '{"name": "x", "path": "y", "base_model_name": "z"}')
    assert parse_modules(given) == (AdapterModule("sql", "a/b=c"), AdapterModule("x", "y", "z"))
    for text_, message in {
        "sql": "must be NAME=PATH", "=a": "must be NAME=PATH", "{": "must be NAME=PATH", '{"name": "a"}': "got",
        '{"name": "a", "path": "b", "rank": 3}': "the key 'rank'", "a\n=b": "must be NAME=PATH",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            parse_modules([text_])
    with pytest.raises(ConfigError, match="the name 'a' twice"):
        ServerOptions(lora_modules=("a=b", "a=c"))
    with pytest.raises(ConfigError, match="allow_runtime_lora needs lora_root"):
        ServerOptions(allow_runtime_lora=True)


def test_modules_are_served_from_the_start(demo_model: Path, root: Path) -> None:
    flags = ("--enable-lora", "--lora-modules", f"sql={root / 'a'}", f'{{"name": "b", "path": "{root / "b"}"}}')
    with running_server(str(demo_model), *flags) as server:
        listed = {model["id"]: model["parent"] for model in server.get("/v1/models").json()["data"]}
        assert set(listed) == {str(demo_model), "sql", "b"}
        assert listed["sql"] == str(demo_model)
        answers = {
            server.post("/v1/completions", {"model": name, "prompt": PROMPT, **GREEDY}).json()["choices"][0]["text"]
            for name in listed
        }
        assert len(answers) == 3


def test_pins_of_marked_prefixes_are_of_one_adapter(server: OpenAIServer) -> None:
    """A prefix that one adapter has computed is no cache read of another one, nor of the model."""
    load(server, "a")
    load(server, "b")
    system = [{"type": "text", "text": "Words of a system text. " * 9, "cache_control": {"type": "ephemeral"}}]
    body = {"max_tokens": 2, "system": system, "messages": [{"role": "user", "content": "What?"}]}
    for model in ("a", "b", NAME):
        usages = [server.http.post("/v1/messages", json=body | {"model": model}).json()["usage"] for _ in range(2)]
        assert usages[0]["cache_read_input_tokens"] < 16
        assert usages[0]["cache_creation_input_tokens"] > 16
        assert usages[1]["cache_creation_input_tokens"] == 0
    pinned = server.http.get("/v1/prefixes").json()["data"]
    assert len(pinned) == 3
    for pin in pinned:
        server.http.delete(f"/v1/prefixes/{pin['id']}").raise_for_status()
