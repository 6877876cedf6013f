"""Commands on models by name: pull, list, show, rm and run."""
