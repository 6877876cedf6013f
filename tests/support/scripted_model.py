"""A model that answers by a script: real tokens from a real engine, chosen by the conversation's template.

A script has a name and the texts of its answers. The last message of the user that names one (`[[NAME]]`) begins it,
and each message of the assistant behind that is a step: the chat template ends a prompt with a token for script and
step, and after that token the model greedily writes the text of the step. So sessions of any length, of clients that
cannot be told what to send, run in one server, and no length of a prompt has to be known.

Every piece of a text is a token of its own that no text is encoded as, and the next token depends on the last one
alone: attention reads the whole context, and adds nothing. Requests without tools (titles, checks of a connection) get
the script `plain`.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.small_tokenizers import EOS, save

NUM_POSITIONS = 196_608
PLAIN = "plain"
_WIDTH = 64
_MARGIN = 100.0             # between logits: at temperature 1, too, a step has one text
_PIECE_BYTES = 8            # bytes of a text in a token

_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- set at = namespace(script='plain', step=0) %}
{%- for m in messages %}<|{{ m.role }}|>
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}
{%- if m.role == 'assistant' %}{% set at.step = at.step + 1 %}{% endif %}
{%- if m.role == 'user' and tools and '[[' in m.content %}
{%- set at.script = m.content.split('[[')[-1].split(']]')[0] %}{% set at.step = 0 %}
{%- endif %}</s>
{% endfor %}
{%- if not tools %}{% set at.step = 0 %}{% endif %}
{%- if add_generation_prompt %}<|assistant|>
<|{{ at.script }} {{ at.step }}|>{%- endif %}"""


def write_scripted_model(folder: Path, scripts: Mapping[str, Sequence[str]], endless: Sequence[str] = ()) -> Path:
    """Write the model; return its folder. The last text of an `endless` script is repeated for ever."""
    pieces = _Pieces()
    starts = dict[str, int]()           # starts of scripts and steps, keyed by marker
    successors = dict[int, int]()
    for name, texts in scripts.items():
        for step, text in enumerate(texts):
            ids = pieces.add(text)
            starts[f"<|{name} {step}|>"] = ids[0]
            successors |= dict(pairwise(ids))
            if name in endless and step == len(texts) - 1:
                successors[ids[-1]] = ids[0]
    tokenizer = Tokenizer(models.BPE(pieces.vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = [EOS, *starts]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in markers])
    successors |= {tokenizer.token_to_id(marker): first for marker, first in starts.items()}
    save(tokenizer, folder, chat_template=_TEMPLATE, bos_token=None)
    _write_weights(folder, tokenizer.get_vocab_size(), tokenizer.token_to_id(EOS), successors)
    return folder


class _Pieces:
    """A vocabulary of bytes, and of the pieces of texts, each of which is in it once."""

    def __init__(self) -> None:
        self._letters = _letters()
        self.vocab = {letter: number for number, letter in enumerate(self._letters.values())}

    def add(self, text: str) -> list[int]:
        """Cut a text into new pieces; return their ids."""
        letters = "".join(self._letters[byte] for byte in text.encode())
        pieces = list[str]()
        rest = ""
        for letter in letters:
            rest += letter
            if len(rest) >= _PIECE_BYTES and rest not in self.vocab:
                self.vocab[rest] = len(self.vocab)
                pieces.append(rest)
                rest = ""
        while rest:                     # the end of another text, too: part of a longer piece
            rest = (pieces.pop() if pieces else "") + rest
            if rest not in self.vocab:
                self.vocab[rest] = len(self.vocab)
                pieces.append(rest)
                rest = ""
            assert not rest or pieces, f"the text {text!r} is in the script already"
        return [self.vocab[piece] for piece in pieces]


def _letters() -> dict[int, str]:
    """Return the character that stands for each byte in byte-level BPE (Radford et al. 2019)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)}


def _write_weights(folder: Path, vocab_size: int, end: int, successors: Mapping[int, int]) -> None:
    """Write config and weights of a Llama. A token without a successor is followed by the end of the sequence."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(vocab_size, _WIDTH, generator=generator))
    last = embedding[end].clone()
    head = torch.zeros(vocab_size, _WIDTH)
    for token in range(vocab_size):
        if token not in successors:
            embedding[token] = last
    scale = _MARGIN / _WIDTH**0.5       # the norm scales embeddings of length 1 to the root of the width
    head[end] = scale * last
    for token, successor in successors.items():
        head[successor] += scale * embedding[token]
    layer = "model.layers.0."
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(_WIDTH), "lm_head.weight": head}
    tensors |= {f"{layer}{name}.weight": torch.ones(_WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"{layer}self_attn.{name}_proj.weight": torch.zeros(16, _WIDTH) for name in "qkv"}
    tensors[f"{layer}self_attn.o_proj.weight"] = torch.zeros(_WIDTH, 16)
    tensors |= {f"{layer}mlp.{name}_proj.weight": torch.zeros(16, _WIDTH) for name in ("gate", "up")}
    tensors[f"{layer}mlp.down_proj.weight"] = torch.zeros(_WIDTH, 16)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": _WIDTH,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": NUM_POSITIONS, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": end,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
