"""The command line: `quire serve`, `chat`, `generate`, `bench`. A command loads torch when it needs a model, not before."""
