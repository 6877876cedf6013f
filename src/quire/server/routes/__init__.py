"""HTTP routes by group."""
