"""The command line: `quire serve`, `chat`, `generate`, `bench`. A command loads torch only when it needs a model."""
