"""Tensor parallelism on one machine: ranks as processes that share memory, and rank 0 beside the scheduler.

The door of this package is `RankSet` of `quire.engine.parallel.leader`.
"""
