"""Decoders as data: specs and weight maps of model families, the one `Decoder`, and loading from a folder.

Knows positions and cache tensors; knows no request and no scheduler. `resolve` finds a folder, `loader` makes it run.
"""
