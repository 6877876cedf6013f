"""Checkpoints: the tensors of a model by name. `checkpoint` is the protocol, `safetensors` a folder of Hugging Face."""
