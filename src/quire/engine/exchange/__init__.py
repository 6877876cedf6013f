"""Exchanges between the ranks of tensor parallelism: the protocol, and the memory that ranks of one machine share.

The door of this package is `SharedRanks` of `quire.engine.exchange.shared_memory`; rooms that start ranks use the rest.
"""
