"""Drafting: speculative decoding's guesses of next tokens. A room: `drafters` is its door."""
