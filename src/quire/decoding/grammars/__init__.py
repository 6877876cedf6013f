"""Constrained decoding by llguidance: tokens are masked, forced and ended as the grammar of a row says. A room.

`constrained.py` is the door: an engine asks it whether a grammar is compiled, a worker has the rows of `rows.py`.
"""
