"""Steps on a GPU: two in flight; measured memory."""
