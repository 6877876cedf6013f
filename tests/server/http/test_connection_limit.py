"""How many connections may be open at once."""

import resource
from collections.abc import Iterator

import pytest

from quire.server.http.sockets import RESERVED_FILES, max_connections, raise_file_limit

WANTED = 16384


@pytest.fixture(autouse=True)
def _limits_are_restored() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def set_files(most: int) -> int:
    """Let this process have so many files; return what the system grants it."""
    granted = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, granted))
    return granted


def test_some_files_are_no_connections() -> None:
    set_files(1024)
    assert max_connections(WANTED) == 1024 - RESERVED_FILES


def test_system_is_asked_for_all_and_for_no_more() -> None:
    granted = set_files(1024)
    raise_file_limit(WANTED)
    wanted = WANTED + RESERVED_FILES
    most = wanted if granted == resource.RLIM_INFINITY else min(wanted, granted)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, granted)
    assert max_connections(WANTED) == most - RESERVED_FILES


def test_limit_that_is_high_enough_is_left_alone() -> None:
    set_files(1024)
    raise_file_limit(100)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
    assert max_connections(100) == 100
