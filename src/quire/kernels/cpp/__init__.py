"""The ops in C++ (csrc/), for the CPU: thin wrappers that check what they are given and pass addresses.

The extension, `_kernels`, is built when the package is installed; where no compiler was found it is not there, and the
PyTorch stand-ins serve. It is imported after torch, so that both use one OpenMP runtime: the library is the same by
name, and the first one loaded serves all.
"""
