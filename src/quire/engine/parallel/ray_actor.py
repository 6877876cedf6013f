"""Ray actor of a rank: starts its process on the actor's machine, which joins the run over TCP as those of other nodes.

The process ends with the actor. Loads no torch.
"""

import msgspec

from quire.engine.options import EngineOptions
from quire.engine.parallel.node import Members


class RankActor:
    """One rank. Its secret is passed to `run`, not at the creation of the actor, of which Ray keeps the arguments."""

    def run(self, options: bytes, rank: int, num_threads: int, address: str, port: int, key: bytes) -> tuple[str, str]:
        """Run the rank until it ends; return the name of an error's type and the reason.

        `options` are EngineOptions in msgpack; `address` and `port` of rank 0.
        """
        decoded = msgspec.msgpack.decode(options, type=EngineOptions)
        members = Members(decoded, {rank: num_threads}, address, port, key)
        try:
            reason = members.wait()
        finally:
            members.close()
        return type(reason).__name__, str(reason)
