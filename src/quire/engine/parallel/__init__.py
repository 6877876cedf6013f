"""Tensor parallelism: the ranks of one model as processes, on CPUs and GPUs of one machine or several."""
