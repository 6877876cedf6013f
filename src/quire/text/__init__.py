"""Text and tokens: tokenizer, incremental detokenizer, chat template. Loads no torch."""
