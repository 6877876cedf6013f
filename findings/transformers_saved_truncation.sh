#!/usr/bin/env bash
# Packages: transformers 5.23.0, tokenizers 0.23.3
# Expected: truncation and padding are arguments of one call of a tokenizer: the next call without them has whole texts, and so has
# the tokenizer.json that save_pretrained writes, for whatever reads it.
# Seen: the next call of the same object has. But a call sets them in the library's tokenizer behind it, and save_pretrained writes
# what the last call left: tokenizers (Tokenizer.from_file) cuts every text to the 4 tokens of that call from then on, and
# pads every shorter one, without a word. The folder seems right to its maker, since transformers resets both in each call.
# A training script that saves the tokenizer it has used makes a model whose prompts engines cut, unless they reset both.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
cat > save.py <<'PY'
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("[UNK]", "[PAD]", *"abcdefgh"))}, "[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")


def lengths(folder):
    """Return how many tokens texts of 8 words and of 1 have, read by transformers and by tokenizers."""
    tokenizer.save_pretrained(folder)
    readers = PreTrainedTokenizerFast.from_pretrained(folder).encode, Tokenizer.from_file(f"{folder}/tokenizer.json").encode
    return [[len(reader(text)) for text in ("a b c d e f g h", "a")] for reader in readers]


before = lengths("before")
cut = tokenizer("a b c d e f g h", truncation=True, max_length=4, padding="max_length").input_ids
after = lengths("after")
print(f"one call has {len(cut)} tokens; transformers and tokenizers read {before} of files saved before it, and {after} behind it")
assert before == [[8, 1], [8, 1]] and after == [[8, 1], [4, 4]], "it is no longer so"
PY
venv/bin/python save.py 2> errors || { cat errors; exit 1; }
