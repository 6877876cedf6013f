"""Grammars of structured outputs and of tools, as texts for llguidance."""
