"""Tensors of folders with quantized weights, and the linear weights that they become."""
