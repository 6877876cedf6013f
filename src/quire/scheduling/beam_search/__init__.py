"""Optional beam search: the searches of a scheduler's requests."""
