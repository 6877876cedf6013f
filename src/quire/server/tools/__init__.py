"""Tool calls and reasoning in the text of a model: formats, one incremental parser, grammars that force calls."""
