"""`quire paper`: the figures of the paper, simulated and measured."""
