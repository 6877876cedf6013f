"""Tokenizers of folders without tokenizer.json: SentencePiece, byte-level BPE, tekken. A room: `reader` is its door."""
