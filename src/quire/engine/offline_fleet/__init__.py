"""Optional engines of an `LLM` with replicas: a fleet for a caller without an event loop."""
