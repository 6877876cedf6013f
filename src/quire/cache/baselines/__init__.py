"""Memory baselines of Kwon et al. 2023, section 6.1: one contiguous chunk per sequence, by a buddy allocator."""
