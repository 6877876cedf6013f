"""Environment variables that Kubernetes and Docker set for a service or a link called "quire", kept apart from flags.

They look like flags in the environment: QUIRE_PORT=tcp://10.96.12.7:8000 has the name of `--port`. Such a value is
ignored with a warning. Any other value that a flag cannot have is an error that names the variable.
"""

import re
from collections.abc import Iterable, MutableMapping

from quire_vllm.flags import PREFIX, variable_of

_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
_SERVICE_VARIABLE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


def drop_service_variables(flags: Iterable[str], environment: MutableMapping[str, str]) -> str | None:
    """Remove variables of these flags' names that hold a service's address; return a warning, or None if none does."""
    names = [name for name in map(variable_of, flags) if _ADDRESS.fullmatch(environment.get(name, ""))]
    if not names:
        return None
    values = ", ".join(f"{name}={environment.pop(name)}" for name in names)
    rest = sorted(name for name in environment if _SERVICE_VARIABLE.fullmatch(name.removeprefix(PREFIX)))
    as_well = f" (as are {', '.join(rest)})" if rest else ""
    return (
        f"{values} is ignored{as_well}: Kubernetes sets it for a service called quire, and Docker for a link of that "
        f"name; set the flag on the command line or in the file of --config"
    )
