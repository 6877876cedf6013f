"""Source of random weights: what it reads, warns of and refuses."""

import json
from pathlib import Path

import pytest

from quire.core.errors import ModelError
from quire.model.dummy_weights import read_dummy
from support.gguf_files import convert
from support.random_model import write_random_model
from support.zero_model import config_of


def test_folder_needs_config_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("Llama", dtype="bfloat16")))
    source = read_dummy(tmp_path)
    assert (source.dtype(), source.spec.vocab_size) == ("bfloat16", 301)
    assert caplog.messages == [
        f"load_format dummy: the weights of {tmp_path} are random numbers, and answers mean nothing"
    ]


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantized_weights_are_refused(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    quantized = config_of("Llama", **{key: {"quant_method": "gptq", "bits": 4}})
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ModelError, match=r"config.json: load_format 'dummy' makes floating-point weights"):
        read_dummy(tmp_path)
    assert caplog.messages == []


def test_gguf_file_is_refused(tmp_path: Path) -> None:
    file = convert(write_random_model(tmp_path), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model.gguf: load_format 'dummy' needs a folder with config.json"):
        read_dummy(file)


def test_folder_without_config_is_refused_as_any(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json"):
        read_dummy(tmp_path)
