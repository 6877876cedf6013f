"""Bounds on what clients hold at a time: bodies in memory, requests, logprobs, pinned prefixes."""
