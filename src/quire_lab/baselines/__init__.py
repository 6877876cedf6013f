"""Baselines of Kwon et al. 2023, section 6.1: contiguous memory, Orca's reservations, static batches."""
