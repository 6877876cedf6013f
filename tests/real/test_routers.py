"""Routers of mixtures of experts, and latent attention, beside llama.cpp on the same random files of float32.

llama.cpp keeps keys and values in 16 bits, so that scores which are almost equal may choose other experts. The random
files of these families have none.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from formats.gguf.test_gguf_weights import LATENTS, PROMPT, WITH_EXPERTS, logits_of
from quire.kernels.choice import choose_back_end
from support.gguf_files import convert, latent_metadata
from support.llama_cpp import LlamaCpp
from support.paged_runner import PagedRunner
from support.random_folder import write_random_folder

pytestmark = pytest.mark.real

WITHOUT_TOKENIZER = {"tokenizer.ggml.model": "none", "general.file_type": 0}
OWN: dict[str, dict[str, Any]] = {"ernie4_5-moe": {"ernie4_5-moe.expert_shared_feed_forward_length": 256}}
MOST = 0.01  # nats; 0.003 to 0.005 were seen, and 0.8 with another expert


def assert_has_logprobs_of_llama_cpp(file: Path, llama_cpp_folder: Path) -> None:
    back_end = choose_back_end(torch.device("cpu"), "cpp")
    found = logits_of(file, back_end, PagedRunner, dtype="float32").log_softmax(dim=-1)
    with LlamaCpp(llama_cpp_folder, file) as theirs:
        expected = theirs.logits(PROMPT).log_softmax(dim=-1)
    assert (found - expected).abs().max() < MOST


@pytest.mark.parametrize("family", ["qwen2moe", "qwen3moe", "glm4moe", "dots1", "minimax-m2", "ernie4_5-moe"])
def test_logprobs_are_those_of_llama_cpp(family: str, llama_cpp_folder: Path, tmp_path: Path) -> None:
    config = WITH_EXPERTS[family] | {"num_hidden_layers": 2}
    folder = write_random_folder(tmp_path / "model", config, torch.float32)
    metadata = WITHOUT_TOKENIZER | {f"{family}.vocab_size": config["vocab_size"]} | OWN.get(family, {})
    assert_has_logprobs_of_llama_cpp(convert(folder, tmp_path / "model.gguf", **metadata), llama_cpp_folder)


@pytest.mark.parametrize("is_split", [True, False], ids=["newer", "older"])
def test_logprobs_of_latent_attention_are_those_of_llama_cpp(
    is_split: bool, llama_cpp_folder: Path, tmp_path: Path
) -> None:
    """V2 is not among them: llama.cpp knows files with one projection of queries by their number of layers."""
    config = LATENTS["v3"]
    folder = write_random_folder(tmp_path / "model", config, torch.float32)
    metadata = WITHOUT_TOKENIZER | latent_metadata(config, is_split=is_split) | {
        "deepseek2.vocab_size": config["vocab_size"], "deepseek2.rope.scaling.yarn_log_multiplier": 0.07,
    }  # fmt: skip
    assert_has_logprobs_of_llama_cpp(convert(folder, tmp_path / "model.gguf", **metadata), llama_cpp_folder)
