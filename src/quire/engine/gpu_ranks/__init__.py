"""Tensor parallelism on the GPUs of one machine: a process for each, and exchanges by NCCL in the stream that computes.

The door of this package is `GpuRankSet` of `quire.engine.gpu_ranks.leader`. Nothing of it has run on a card yet.
"""
