"""Formats of checkpoints besides folders of floating-point weights, each in a package.

`engine/formats.py` chooses by the files of a model. A `*_source` module reads the config and loads no torch; it imports
the weights (`*_weights`) when they are opened.
"""
