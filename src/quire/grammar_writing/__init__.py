"""Grammars of structured outputs and of tools, as texts for llguidance. A room: `writer` is its door."""
