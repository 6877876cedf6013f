"""Two machines on this one: network namespaces that a pair of virtual devices joins, or two loopback addresses."""

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Machine(NamedTuple):
    """A machine: the command before those that it runs, and its address."""

    prefix: tuple[str, ...]
    address: str


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def may_make_namespaces() -> bool:
    """Return whether the system lets this process make network namespaces."""
    name = f"quire-{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def two_namespaces() -> Iterator[tuple[Machine, Machine]]:
    """Yield two namespaces, each with one address of a private network that they share; they are removed afterwards."""
    mark = uuid.uuid4().hex[:6]
    names = [f"quire-{mark}-{number}" for number in (0, 1)]
    machines = [Machine(("ip", "netns", "exec", name), f"10.77.0.{number + 1}") for number, name in enumerate(names)]
    made = list[str]()
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", f"q{mark}0", "netns", names[0], "type", "veth", "peer", f"q{mark}1", "netns", names[1])
        for number, (name, machine) in enumerate(zip(names, machines, strict=True)):
            _ip("-n", name, "address", "add", f"{machine.address}/24", "dev", f"q{mark}{number}")
            for device in ("lo", f"q{mark}{number}"):
                _ip("-n", name, "link", "set", device, "up")
        yield machines[0], machines[1]
    finally:
        for name in made:
            _ip("netns", "del", name)


def loopback_addresses() -> tuple[Machine, Machine]:
    """Return two addresses of this machine."""
    return Machine((), "127.0.0.1"), Machine((), "127.0.0.2")
