"""Steps on a GPU: two in flight; measured memory. A room: `device` is its door."""
