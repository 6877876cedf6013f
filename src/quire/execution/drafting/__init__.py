"""Drafting: methods of speculative decoding that propose next tokens. An optional package; `drafters` is its entry."""
