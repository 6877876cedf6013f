"""The command line: `quire generate` and `quire bench`. A command loads torch when it needs a model, not before."""
