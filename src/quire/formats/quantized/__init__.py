"""Folders with quantized weights (GPTQ, AWQ, compressed-tensors, FP8, MXFP4): their config.json, and their tensors."""
