"""Ranks of tensor parallelism on a Ray cluster, which places their processes. Needs `quire[ray]`.

The door of this package is `RayRankSet` of `quire.engine.ray_ranks.leader`.
"""
