"""Models without a tokenizer: servers want a word for that, `LLM` warns; both take token ids then."""

import logging
from contextlib import closing
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import InvalidRequestError, ModelError
from quire.engine.formats import load_tokenizer
from support.cycle_model import write_cycle_model
from support.server import ServerProcess, running_server

CYCLE = [5, 6, 7]
BODY = {"prompt": [5], "temperature": 0, "max_tokens": 3, "return_token_ids": True}


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model without a tokenizer, which says 5, 6, 7, 5, 6, ..."""
    return write_cycle_model(tmp_path_factory.mktemp("mute"), 16, CYCLE)


def test_server_refuses_to_start_unless_tokenizers_are_skipped(mute: Path) -> None:
    with closing(ServerProcess(str(mute), "--num-kv-blocks", "16", is_forked=True)) as server:
        assert server.process.wait(timeout=120) == 1
        assert f"{mute} has no tokenizer" in server.log
        assert "--skip-tokenizer-init serves token ids alone" in server.log
    with running_server(str(mute), "--num-kv-blocks", "16", "--skip-tokenizer-init") as running:
        assert running.post("/v1/completions", BODY).json()["choices"][0]["token_ids"] == [6, 7, 5]
        refused = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert "tokenizer" not in running.log.lower()


def test_llm_warns_once_and_takes_token_ids(mute: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quire"), LLM(mute, num_kv_blocks=16) as llm:
        (output,) = llm.generate([5], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        with pytest.raises(ModelError, match="the model has no tokenizer"):
            llm.get_tokenizer()
    assert list(output.outputs[0].token_ids) == [6, 7, 5]
    (warned,) = [record.getMessage() for record in caplog.records]
    assert "prompts must be token ids" in warned


def test_tokenizer_that_is_there_can_be_skipped(demo_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quire"), LLM(demo_model, num_kv_blocks=16, skip_tokenizer_init=True) as llm:
        assert llm.tokenizer is None
        (output,) = llm.generate([5], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="the model has no tokenizer"):
            llm.generate("text", use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)
    assert not caplog.records


def test_folder_that_is_no_model_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no folder of a model: no file config\.json$"):
        load_tokenizer(tmp_path, "required")


def test_publishers_own_form_of_a_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"dim": 64, "vision_encoder": {"hidden_size": 32}}')
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(16))
    with pytest.raises(ModelError, match=r"params\.json is of a model in its publisher's own form .* its encoder of"):
        LLM(tmp_path, skip_tokenizer_init=True)
