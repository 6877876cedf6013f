"""Formats in which models write tool calls and reasoning, as rows of tables, and grammars made from the rows."""
