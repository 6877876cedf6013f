"""Batch files: requests in, answers out. A room of the command line."""
