"""GGUF files (llama.cpp): what their metadata says, as a model config and as a tokenizer. Loads no torch."""
