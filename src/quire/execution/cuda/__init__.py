"""Steps on a GPU: two in flight, by CUDA graphs; measured memory."""
