"""Fixtures for tests of commands."""

from support.command_line import no_quire_environment, run  # noqa: F401 (fixtures)
