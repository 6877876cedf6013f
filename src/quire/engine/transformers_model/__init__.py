"""Models of transformers on Quire's paged cache: any causal model with an attention hook that has no family here."""
