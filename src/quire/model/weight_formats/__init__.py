"""Weight formats: the tensors of a checkpoint that make a `LinearWeight`, and the bytes that a packed one takes.

`format` is the protocol, with one module per format; `sizes` counts bytes, without torch.
"""
