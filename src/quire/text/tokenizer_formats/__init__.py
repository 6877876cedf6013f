"""Tokenizers of folders without tokenizer.json: SentencePiece, byte-level BPE, tekken."""
