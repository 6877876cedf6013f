"""Requests: prompts and parameters in, text, logprobs and vectors out. Knows no process and no scheduler."""
