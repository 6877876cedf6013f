"""Scheduling baselines of Kwon et al. 2023, section 6.1: Orca's reservations and static batches."""
