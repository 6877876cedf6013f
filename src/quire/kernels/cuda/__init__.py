"""The paper's kernel: PagedAttention in CUDA C++, compiled by NVRTC when a shape first needs it.

`attention.CUDA_ATTENTION` is for --attention-backend cuda. `paged_attention.cu` is the source,
`cuda_source.py` compiles and launches it.
"""
