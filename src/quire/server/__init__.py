"""HTTP: an OpenAI-compatible server over an engine in a child process. Knows no block and no tensor, loads no torch."""
