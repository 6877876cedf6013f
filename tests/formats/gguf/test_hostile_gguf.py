"""GGUF files from hostile hands: each loads, runs and tokenizes, or ends in a ModelError that names the file."""

import random
import tempfile
from pathlib import Path

import pytest

from quire.engine.formats import load_tokenizer, read_source
from quire.kernels.reference.back_ends import TORCH
from quire.model.loader import load_model
from quire.model.resolve import resolve_model
from support import small_tokenizers
from support.fuzz_seeds import fuzz
from support.gguf_blocks import random_blocks
from support.gguf_files import converted
from support.hostile_models import is_refused
from support.random_folder import write_random_folder
from support.spoilt_gguf import Contents, spoil

TOKENS = [5, 6, 7]
KINDS = {
    "byte-level, K-quants": (small_tokenizers.byte_level, random_blocks({"attn_v.weight": "Q6_K"}, "Q4_K")),
    "SentencePiece, codes": (small_tokenizers.byte_fallback, random_blocks({"ffn_up.weight": "Q8_0"}, "IQ4_NL")),
}


@pytest.fixture(params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Contents:
    """Return metadata and tensors of a tiny model with all kinds of both."""
    make, quantize = KINDS[request.param]
    tokenizer = make()
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 256,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    folder = write_random_folder(tmp_path / "model", config)
    small_tokenizers.save(tokenizer, folder, chat_template=small_tokenizers.CHAT_TEMPLATE)
    return converted(folder, quantize)


def use(path: Path, paged_runner: type) -> None:
    """Read all that the file says, and run the model."""
    source = read_source(resolve_model(str(path)))
    source.eos_token_ids()
    tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("the stop 日本\n"))
    model = load_model(source, back_end=TORCH, table_positions=64)
    num_tokens = min(len(TOKENS), source.spec.max_position_embeddings)  # engines refuse longer prompts
    paged_runner(model).step({"a": TOKENS[:num_tokens]})


def run_spoilt(whole: Contents, seed: int, paged_runner: type) -> bool:
    """Return whether a spoilt file was refused."""
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "model.gguf"
        done = spoil(whole, path, random.Random(seed))
        return is_refused(lambda: use(path, paged_runner), path, f"seed {seed}: {done}")


def test_a_spoilt_file_runs_or_is_refused_by_name(whole: Contents, paged_runner: type) -> None:
    refused = [run_spoilt(whole, seed, paged_runner) for seed in range(50)]
    assert sum(refused) > 15


@pytest.mark.fuzz
def test_many_spoilt_files(whole: Contents, paged_runner: type) -> None:
    refused = list[bool]()
    fuzz(lambda seed: refused.extend(run_spoilt(whole, 500 * seed + i, paged_runner) for i in range(500)), 1000)
    assert sum(refused) > len(refused) // 4
