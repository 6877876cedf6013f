"""GGUF files (llama.cpp): their metadata as a model config, their tokenizer, their tensors in blocks."""
