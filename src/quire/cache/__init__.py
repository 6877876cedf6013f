"""The KV cache as paged memory: the owners of each block. No torch, no clock, no I/O.

`KVCacheManager` is the only class through which the scheduler touches memory. Behind it stand one `BlockPool`, which
counts the owners of every physical block, and one `BlockTable` per sequence, which maps positions to blocks
(Kwon et al. 2023, sections 4.2 to 4.4).
"""
