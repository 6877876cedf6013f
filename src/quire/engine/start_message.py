"""The first message to an engine process.

Apart from `quire.engine.messages`, which needs NumPy: a server starts its engines before it loads that.
"""

import msgspec

from quire.engine.options import EngineOptions


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The options of the engine to load."""

    options: EngineOptions
