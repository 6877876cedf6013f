"""Ranks on the GPUs of several machines: joined as those of CPUs (`nodes`), with NCCL between them (`gpu_ranks`).

The door of this package is `GpuNodeRankSet` of `quire.engine.gpu_nodes.leader`.
"""
