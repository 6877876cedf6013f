"""Chat requests of all APIs: a conversation, its tools and grammars to an engine request, an output to its events."""
