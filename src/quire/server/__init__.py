"""OpenAI-compatible HTTP server over an engine in a child process. Loads no torch; only `watch` looks at blocks."""
