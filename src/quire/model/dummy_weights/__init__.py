"""Random weights of a config's shapes, for measurements. An optional package; `source` is its entry."""
