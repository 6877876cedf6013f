"""Tensors of GGUF files, and the linear weights that their blocks become."""
