"""The C++ extension of csrc/, `_kernels`, below all that calls it: kernels, formats, model, execution and engine.

It is built when the package is installed. Where no compiler was found it is not there, and stand-ins in Python serve.
"""
