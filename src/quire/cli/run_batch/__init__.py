"""Batch files: requests in, answers out."""
