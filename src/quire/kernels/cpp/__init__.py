"""The ops in C++ (csrc/), for the CPU: thin wrappers that check what they are given and pass addresses.

The extension, `_kernels`, is built when the package is installed; where no compiler was found it is not there, and the
PyTorch stand-ins serve. All of them take and return NumPy's arrays.
"""
