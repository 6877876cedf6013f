"""Attention that --attention-backend chooses on a GPU in place of Triton's: FlashInfer's, and the paper's kernel.

The paper's is PagedAttention in CUDA C++, `paged_attention.cu`, compiled by NVRTC when a shape first needs it.
"""
