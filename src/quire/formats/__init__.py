"""Formats of checkpoints besides folders of floating-point weights, each in a package.

`engine/formats.py` imports the one that a model needs. Packages named `_tensors` load torch, the others do not.
"""
