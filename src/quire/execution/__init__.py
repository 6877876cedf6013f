"""A plan becomes tensors, a forward pass and sampled tokens: the executor, the worker and its persistent batch."""
