"""Constrained decoding by llguidance: tokens are masked, forced and ended as the grammar of a row says.

An engine asks `constrained.py` whether a grammar is compiled, a worker has the rows of `rows.py`.
"""
