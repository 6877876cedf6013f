"""Tensor parallelism on one machine: ranks that share memory."""
