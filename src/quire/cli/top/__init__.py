"""A view of a running server in the terminal."""
