"""The ops in Triton, for CUDA: the meaning of each is that of its module in `quire.kernels.reference`.

Nothing is built when the package is installed: Triton compiles a kernel for the card when it first runs. The wrappers
check what they are given and never wait for the device. Without one, Triton's interpreter runs the same kernels on
tensors in host memory; it is chosen by TRITON_INTERPRET=1 before this package is imported, and is for tests.
"""
