"""The ollama package against several models behind one server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.model.resolve import DEMO_MODEL
from support.calling_model import CallingModel, call_text, write_calling_model
from support.server import running_server

ollama = pytest.importorskip("ollama", reason="ollama is not installed: make clients runs these tests")


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    texts = {"call": call_text("get_weather", {"city": "Rome"}), "plain": "water"}
    return write_calling_model(tmp_path_factory.mktemp("models") / "calling", texts)


@pytest.fixture(scope="module")
def client(calling: CallingModel) -> Iterator[Any]:
    (Path(calling.folder).parent / "demo").symlink_to(DEMO_MODEL)
    folder = str(calling.folder.parent)
    with running_server("--models-dir", folder, "--api-key", "sesame", "--num-kv-blocks", "64") as server:
        client = ollama.Client(host=server.url, headers={"Authorization": "Bearer sesame"})
        with client._client:        # it has no close of its own
            yield client


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: where
    """
    return f"fair in {city}"


def test_chats_streams_and_calls(client: Any, calling: CallingModel) -> None:  # noqa: ANN401
    options = {"temperature": 0}
    messages = calling.messages["plain"]
    assert client.chat(model="calling", messages=messages, options=options).message.content == "water"
    stream = client.chat(model="calling", messages=messages, options=options, stream=True)
    assert "".join(part.message.content for part in stream) == "water"
    answer = client.chat(model="calling", messages=calling.messages["call"], tools=[get_weather], options=options)
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})
    stream = client.chat(
        model="calling", messages=calling.messages["call"], tools=[get_weather], options=options, stream=True
    )
    assert [call.function.name for part in stream for call in part.message.tool_calls or ()] == ["get_weather"]


def test_models_are_listed_shown_and_unloaded(client: Any) -> None:  # noqa: ANN401
    assert [each.model for each in client.list().models] == ["calling", "demo"]
    assert client.show("demo").details.family == "llama"
    assert client.generate(model="demo", prompt="import os", options={"num_predict": 2}, raw=True).eval_count == 2
    (running,) = client.ps().models
    assert running.model == "demo"
    assert client.generate(model="demo", keep_alive=0).done_reason == "unload"


def test_errors_are_its_own(client: Any) -> None:  # noqa: ANN401
    with pytest.raises(ollama.ResponseError, match="there is no model 'none'") as failed:
        client.chat(model="none", messages=[{"role": "user", "content": "x"}])
    assert failed.value.status_code == 404
