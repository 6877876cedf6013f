"""The command line: `quire serve`, `chat`, `generate`, `bench`. A command loads the engine only if it needs a model."""
