"""Checks of structured outputs: the fields of bodies, and a process with limits that checks their grammars."""
