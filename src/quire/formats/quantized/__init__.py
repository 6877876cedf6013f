"""Folders with quantized weights (GPTQ, AWQ, compressed-tensors, FP8): what their config.json says. Loads no torch."""
