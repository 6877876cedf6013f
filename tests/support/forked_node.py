"""`quire serve` of a node other than 0 in a forked process (support/forked_server.py), in a session of its own."""

import os
from importlib import import_module

from quire.engine.parallel import node, tcp  # noqa: F401 (tcp, and with it torch: what a rank loads is loaded once)
from support import forked_server
from support.forked_engines import fork_child
from support.nodes import RANK_MODULE


def main() -> None:
    """Run the command line; ranks are forks, processes of the module that the environment names."""
    os.setsid()
    node.start_module, node.PROCESS_MODULE = fork_child, os.environ[RANK_MODULE]  # type: ignore[assignment]  # as there
    import_module(node.PROCESS_MODULE)
    forked_server.main()
