"""A small model that recites a text: greedily it gives the text's tokens, again and again; sampled, it makes mistakes.

It is a GPT-2 whose embedding of a position points at the token that comes after it. So a test knows what an answer
says, also where its characters are cut into many tokens, and at temperature 1 or more an answer has tokens that fit
nothing: parts of characters, and now and then the end of the sequence.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from support.small_tokenizers import BOS, CHAT_TEMPLATE, EOS, save

WIDTH = 64
NUM_POSITIONS = 4096  # many seconds of talk, for tests that look at an answer in the making
CONVICTION = 4.0  # how much more a position says than the token that stands there

ROUNDS = 30  # length of the script: more outputs than server and sockets hold, so that no slow reader gets all in one

TEXT = "The end is 你好，世界。 Ünïcödé 🙂🎉 👩‍🚀 ok\n"


class Reciter(NamedTuple):
    """A model's folder, the tokens that it recites, and a conversation after which they begin with the first."""

    folder: Path
    script: list[int]
    messages: list[dict[str, str]]

    def prompt(self, start: int = 0) -> list[int]:
        """Return a prompt after which the recital begins with token `start` of the script."""
        return self.script + self.script[:start]


def write_reciter(folder: Path, tokenizer: Tokenizer, text: str = TEXT) -> Reciter:
    """Write the model with a chat template, and return it."""
    save(tokenizer, folder, chat_template=CHAT_TEMPLATE)
    script, vocab_size = tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.get_vocab_size()
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_embd": WIDTH,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": NUM_POSITIONS,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(vocab_size, script), folder / "model.safetensors")
    return Reciter(folder, script, _messages(tokenizer, len(script)))


def _messages(tokenizer: Tokenizer, num_tokens: int) -> list[dict[str, str]]:
    """Return a conversation that the template and the tokenizer make into that many tokens."""
    for length in range(num_tokens):
        rendered = f"{BOS}user: {'x' * length}\nassistant:"
        if len(tokenizer.encode(rendered, add_special_tokens=False).ids) == num_tokens:
            return [{"role": "user", "content": "x" * length}]
    raise AssertionError("the script is too short for a conversation")


def _tensors(vocab_size: int, script: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * WIDTH**-0.5

    wte = random(vocab_size, WIDTH)
    following = torch.tensor([script[(position + 1) % len(script)] for position in range(NUM_POSITIONS)])
    layer = "h.0."
    return {
        "wte.weight": wte,
        "wpe.weight": CONVICTION * wte[following],
        **_norm(f"{layer}ln_1"),
        f"{layer}attn.c_attn.weight": random(WIDTH, 3 * WIDTH),
        f"{layer}attn.c_attn.bias": torch.zeros(3 * WIDTH),
        f"{layer}attn.c_proj.weight": 0.2 * random(WIDTH, WIDTH),
        f"{layer}attn.c_proj.bias": torch.zeros(WIDTH),
        **_norm(f"{layer}ln_2"),
        f"{layer}mlp.c_fc.weight": random(WIDTH, 4 * WIDTH),
        f"{layer}mlp.c_fc.bias": torch.zeros(4 * WIDTH),
        f"{layer}mlp.c_proj.weight": 0.2 * random(4 * WIDTH, WIDTH),
        f"{layer}mlp.c_proj.bias": torch.zeros(WIDTH),
        **_norm("ln_f"),
    }


def _norm(name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.ones(WIDTH), f"{name}.bias": torch.zeros(WIDTH)}
