"""Bounds on what clients hold at a time, and fair shares of threads, processes and the event loop between them."""
