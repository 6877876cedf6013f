"""GGUF files (llama.cpp): what their metadata says, as a model config. Loads no torch."""
