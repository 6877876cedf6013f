"""Ranks of tensor parallelism on several machines: started by hand on each, or by Ray.

The door of this package is `NodeRankSet` of `quire.engine.nodes.leader`, and for the machines other than the first
`run_node` of `quire.engine.nodes.agent`.
"""
