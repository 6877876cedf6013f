"""How many connections may be open at once: a bound of ours, or what the system grants this process in files."""

import contextlib
import resource

MAX_CONNECTIONS = 16384
RESERVED_FILES = 64      # for all that is no connection


def allow_connections() -> None:
    """Ask the system for as many as it grants, if that is less than our bound now."""
    if max_connections() == MAX_CONNECTIONS:
        return
    _, most_granted = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    if most_granted != resource.RLIM_INFINITY:
        wanted = min(wanted, most_granted)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most_granted))


def max_connections() -> int:
    """Return how many connections may be open at once."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, most_files - RESERVED_FILES))
