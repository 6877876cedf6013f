"""How many connections may be open at once: a bound of ours, or what the system grants this process in files."""

import contextlib
import resource

RESERVED_FILES = 64      # for all that is no connection


def allow_connections(wanted: int) -> None:
    """Ask the system for as many as are wanted, or as it grants, if there may be fewer now."""
    if max_connections(wanted) == wanted:
        return
    _, most_granted = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = wanted + RESERVED_FILES
    if most_granted != resource.RLIM_INFINITY:
        num_files = min(num_files, most_granted)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most_granted))


def max_connections(wanted: int) -> int:
    """Return how many of the connections that are wanted may be open at once."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, most_files - RESERVED_FILES))
