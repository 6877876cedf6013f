"""The meaning of each op, in PyTorch: what every back end is tested against, and what serves where there is none."""
