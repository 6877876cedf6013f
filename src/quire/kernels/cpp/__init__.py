"""The ops in C++ (csrc/), for the CPU: thin wrappers that check what they are given and pass addresses.

All of them take and return NumPy's arrays.
"""
