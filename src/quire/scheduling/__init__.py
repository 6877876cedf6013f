"""Scheduling: the requests of each step and their token counts. Pure Python, no torch, no clock, no I/O."""
