"""Weight formats: the tensors of a checkpoint that make a `LinearWeight`, and the bytes that a packed one takes.

`format` is the protocol; `dense` and `rounded` read floats, `quire.formats` has the others. `sizes` counts bytes,
without torch.
"""
