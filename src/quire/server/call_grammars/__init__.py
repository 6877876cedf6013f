"""Grammars that force tool calls, made from the rows of the formats and the tools' schemas."""
