"""Attention by FlashInfer (Ye et al. 2025), a package that is not among Quire's dependencies.

`attention.FLASHINFER_ATTENTION` is for --attention-backend flashinfer.
"""
