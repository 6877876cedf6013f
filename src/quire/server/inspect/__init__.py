"""Inspection: explanations of past requests, the block map and the pages that draw it."""
