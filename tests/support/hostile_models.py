"""Model files from hostile hands: what using one ends in, within bounds of time and memory."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

from quire.core.errors import ModelError

MAX_SECONDS = 20.0  # CPU seconds for what takes 0.02 s: a bound, not a speed
MAX_GROWTH_BYTES = 1 << 30


def is_refused(use: Callable[[], object], place: Path, note: str) -> bool:
    """Return whether using a model ends in a ModelError; AssertionError for one without `place`, and past the bounds.

    Any other error is raised with `note`.
    """
    size, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    refusal: ModelError | None = None
    try:
        use()
    except ModelError as error:
        refusal = error
    except BaseException as fault:
        fault.add_note(note)
        raise
    assert refusal is None or str(place) in str(refusal), note
    assert time.process_time() - start < MAX_SECONDS, note
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size) * 1024 < MAX_GROWTH_BYTES, note
    return refusal is not None
