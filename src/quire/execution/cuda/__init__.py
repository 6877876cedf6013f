"""Steps on a GPU: two in flight, replayed as CUDA graphs; measured memory. A room: `device` is its door."""
