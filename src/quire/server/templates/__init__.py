"""Rendering of chat templates, in a process with limits."""
