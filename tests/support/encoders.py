"""Tiny random encoders: folders with a tokenizer that joins pairs, and sentence-transformers' modules."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from support.embedders import write_json, write_modules
from support.small_tokenizers import CORPUS

LONGEST = 64
WIDTH = 48
CLS, SEP = 0, 2
_SIZES = {
    "vocab_size": 300, "hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": LONGEST,
}  # fmt: skip
_DISTILBERT = {"vocab_size": 300, "dim": WIDTH, "hidden_dim": 80, "n_layers": 2, "n_heads": 6}
_CONFIGS: dict[str, dict[str, object]] = {
    "Bert": _SIZES,
    "DistilBert": _DISTILBERT | {"max_position_embeddings": LONGEST},
    "ModernBert": _SIZES
    | {"num_hidden_layers": 4, "local_attention": 20, "pad_token_id": 1}
    | {"bos_token_id": CLS, "eos_token_id": SEP, "cls_token_id": CLS, "sep_token_id": SEP},
} | dict.fromkeys(("Roberta", "XLMRoberta"), _SIZES | {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1})


def write_encoder(
    folder: Path, family: str, *, end: str = "Model", kind: str | None = None, **changes: object
) -> Path:
    """Write an encoder; `kind` is its pooling, None: the folder says nothing of it. `changes`: of config.json."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**_CONFIGS[family], **changes)
    model = getattr(transformers, f"{family}{end}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            scale = 0.5 if "emb" in name else 1.3 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * scale if parameter.dim() > 1 else 0.3 * noise + name.endswith("weight"))
    model.save_pretrained(folder)
    if changes:
        written = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", changes | written)
    _tokenizer(has_types=family == "Bert").save(str(folder / "tokenizer.json"))
    if kind is not None:
        write_modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
        mode = {"mean": "mean_tokens", "cls": "cls_token"}[kind]
        write_json(folder / "1_Pooling/config.json", {f"pooling_mode_{mode}": True, "word_embedding_dimension": WIDTH})
    return folder


def _tokenizer(*, has_types: bool) -> Tokenizer:
    words = sorted({word for text in CORPUS for word in text.split()} | set("abcdefghijklmnopqrstuvwxyz:,."))
    pieces = {"[CLS]": CLS, "[PAD]": 1, "[SEP]": SEP, "[UNK]": 3}
    pieces |= {word: number for number, word in enumerate(words, start=4)}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if has_types else "[CLS] $A [SEP] [SEP] $B [SEP]"
    special = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=special)
    tokenizer.enable_truncation(20)  # as in files of published encoders: not to be kept
    tokenizer.enable_padding(length=20)
    return tokenizer
