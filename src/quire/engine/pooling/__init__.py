"""Requests for vectors and scores of prompts, of models that pool: an optional package; `offline` is its entry."""
