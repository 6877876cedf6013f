"""Scales of a layer's keys and values in 8 bits, where the cache stores none."""

from typing import NamedTuple


class KVScales(NamedTuple):
    """Scales of a layer's keys and of its values, where a cache of 8 bits stores none."""

    key: float = 1.0
    value: float = 1.0


ONES = KVScales()
