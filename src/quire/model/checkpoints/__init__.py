"""Checkpoint files: tensors of a model by name. `safetensors` reads a folder in Hugging Face format."""
