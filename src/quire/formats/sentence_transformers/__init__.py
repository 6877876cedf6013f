"""Pooling of folders as sentence-transformers describes it. Loads no torch."""
