#!/usr/bin/env bash
# Package: transformers 5.23.0 (tokenizers 0.23.3), beside sentencepiece 0.2.3; tokenizer.model of Mistral from
# mistral-common 1.13.1.
# Expected: LlamaTokenizer made of a tokenizer.model cuts a text into the pieces that SentencePiece cuts it into.
# Seen: every even number of blanks between two letters is cut otherwise: two blanks into "▁▁", "b" instead of "▁", "▁b", 18
# into 16, 2 and "b" instead of 16, 1 and "▁b". The pieces of blanks have the lowest scores of all, so SentencePiece merges
# them last, and the leftmost first; the converted tokenizer merges them before the word.
# Date: 2026-11-28
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.23.0 sentencepiece==0.2.3 tokenizers==0.23.3 protobuf
venv/bin/pip install --quiet --no-deps mistral-common==1.13.1
mkdir model
cp venv/lib/python3*/site-packages/mistral_common/data/tokenizer.model.v1 model/tokenizer.model
cat > compare.py <<'PY'
import sentencepiece
from transformers import LlamaTokenizer

reference = sentencepiece.SentencePieceProcessor(model_file="model/tokenizer.model")
tokenizer = LlamaTokenizer.from_pretrained("model")
differing = []
for count in range(1, 41):
    text = "a" + " " * count + "b"
    both = reference.encode(text, out_type=str), tokenizer.tokenize(text)
    expected, seen = ([len(piece) for piece in pieces] for pieces in both)
    if expected != seen:
        differing.append(count)
        print(f"{count} blanks: sentencepiece {expected}, transformers {seen}")
assert differing == list(range(2, 41, 2)), f"runs of blanks that differ: {differing}"
PY
venv/bin/python compare.py
