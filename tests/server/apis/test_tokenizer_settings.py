"""/tokenizer_info gives what clients need to render and count by themselves, if it is switched on."""

import json
from pathlib import Path

from quire.engine.options import EngineOptions
from quire.text.tokenizer import Tokenizer
from support.http_app import ask, make_app
from support.openai_server import OpenAIServer, openai_server
from support.small_tokenizers import CHAT_TEMPLATE, byte_level, save


def test_settings_are_told_only_where_that_is_switched_on(server: OpenAIServer, demo_model: Path) -> None:
    assert server.http.get("/tokenizer_info").status_code == 404
    options = EngineOptions(model=str(demo_model), max_model_len=64, num_kv_blocks=16)
    with openai_server(options, enable_tokenizer_info_endpoint=True) as telling:
        told = telling.http.get("/tokenizer_info").json()
    config = json.loads((demo_model / "tokenizer_config.json").read_text())
    assert told["eos_token"] == config["eos_token"]
    assert told["chat_template"] == config["chat_template"]
    assert isinstance(told["tokenizer_class"], str)


def test_model_without_a_tokenizer_is_refused() -> None:
    answer = ask(make_app(enable_tokenizer_info_endpoint=True), "GET", "/tokenizer_info")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_tokens_are_texts_and_files_are_left_out(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, chat_template=CHAT_TEMPLATE)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "pad_token": {"content": "<pad>", "special": True}, "vocab_file": "/home/x/vocab.json", "model_max_length": 64,
        "added_tokens_decoder": {"5": {"content": "<pad>", "lstrip": False}}, "add_bos_token": False,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    told = Tokenizer.from_folder(folder).describe()
    assert (told["pad_token"], told["model_max_length"], told["chat_template"]) == ("<pad>", 64, CHAT_TEMPLATE)
    assert told["added_tokens_decoder"] == {"5": "<pad>"}
    assert "vocab_file" not in told
    json.dumps(told)
