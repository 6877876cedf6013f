"""Small tokenizers made on the spot, one of each kind that models have, as model folders."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "def add(first, second):\n    return first + second  # the sum\n",
    "stop stopping the stops: STOP, END, ###",
    "naïve café, 日本語 and 日本, émigré 😀😀",
)
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level(cuts: pre_tokenizers.PreTokenizer | None = None) -> Tokenizer:
    """Byte-level BPE like GPT-2's: every byte is a token, and some merges; ids 0 to 2 are special.

    `cuts`: of texts into words, with their bytes as letters; None: GPT-2's.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cuts or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[BOS, EOS, PAD], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def falcon() -> Tokenizer:
    """Byte-level BPE with words cut as by Falcon's tokenizer.json: punctuation and groups of three digits apart."""
    cuts = [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
    ]
    return byte_level(pre_tokenizers.Sequence(cuts))


def byte_fallback() -> Tokenizer:
    """SentencePiece's BPE as in Llama 1 and 2: words begin with a low line, unknown characters become byte tokens."""
    pieces = [BOS, EOS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(CORPUS[:3]).replace(" ", "▁")) - {"\n"} | {"▁"})
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("s", "t"), ("o", "p"), ("st", "op"), ("▁", "stop"), ("▁", "▁")]
    pieces += [*letters, *("".join(merge) for merge in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (BOS, EOS, "<unk>")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with byte fallback and a Metaspace decoder: the first low line of a text is dropped."""
    letters = sorted(set("".join(CORPUS[:3]).replace(" ", "▁")) - {"\n"} | {"▁", "▁the", "▁stop"})
    pieces = [(BOS, 0.0), (EOS, 0.0), ("<unk>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)] + [(piece, -float(len(letters))) for piece in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.add_special_tokens([BOS, EOS, "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def metaspace_alone() -> Tokenizer:
    """Unigram without bytes, and a Metaspace decoder: what the vocabulary cannot spell is unknown."""
    letters = sorted(set("".join(CORPUS[:3]).replace(" ", "▁")) - {"\n"} | {"▁", "▁the", "▁stop"})
    pieces = [(BOS, 0.0), (EOS, 0.0), ("<unk>", 0.0), *((piece, -float(len(letters))) for piece in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.add_special_tokens([BOS, EOS, "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words and no decoder: they are joined by spaces."""
    words = [BOS, EOS, "<unk>", *sorted(set(" ".join(CORPUS).split()))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens([BOS, EOS, "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:  # noqa: ANN401
    """Write `folder` as a model's, with BOS and EOS named in its configuration, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config), encoding="utf-8")
    return folder


def write_byte_tokenizer(folder: Path) -> str:
    """Write a tokenizer of the 256 bytes and the special tokens beside a model; return its folder."""
    own = folder / "tokenizer"
    if not own.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([BOS, EOS, PAD])
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=259, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([], trainer)
        save(tokenizer, own)
    return str(own)
