"""Tokenizers of GGUF files: a room, whose door is `tokenizer.py`."""
