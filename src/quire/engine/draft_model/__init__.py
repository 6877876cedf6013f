"""Draft models: loading and comparison of tokens. An optional package; `loading` is its entry."""
