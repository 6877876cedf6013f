"""Architectures of GGUF files, as data: keys of config.json from the metadata, and names of tensors. Loads no torch."""
