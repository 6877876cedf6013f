"""Execution of plans: executors, workers and the persistent batch, from plan to tensors to sampled tokens."""
