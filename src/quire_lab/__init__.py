"""Measurements and predictions over `quire`: benchmarks, the simulator, the paper's figures and its baselines.

`quire` imports nothing of it and finds its commands and its schedulers by the entry points of the distribution.
"""
