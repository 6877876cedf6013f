"""Sleep of an engine: its memory is freed, and an engine of the same sizes is made again when it is woken.

Level 1 frees the KV cache and the rest of the engine, and keeps the weights; level 2 frees the weights as well, which
are read from the model's files again. The levels are vLLM's, where level 1 moves weights from a GPU to the memory of
the host: a CPU has them there already. The ranks of tensor parallelism end at either level.
"""

import gc
from collections.abc import Collection
from dataclasses import replace

from msgspec import structs

from quire.core.errors import ModelError
from quire.engine.assembly import AssembledEngine, assemble, load_alone
from quire.engine.messages import TAGS, Ready, Tag
from quire.engine.sizing import same_sizes


class SleepingEngine:
    """Rest of an engine without requests, which is closed; the caller drops the engine, and then calls `free`."""

    def __init__(self, engine: AssembledEngine, level: int, *, loads_tokenizer: bool) -> None:
        engine.engine.close()
        engine.close()
        limits = engine.ready.limits
        self._options = same_sizes(engine.options, limits, engine.ready.num_swap_blocks)
        self._ready, self._device = engine.ready, engine.loaded.device
        self._tokenizer, self._loads_tokenizer, self._member = engine.tokenizer, loads_tokenizer, engine.member
        self._loaded = engine.loaded if engine.ranks is None else None
        self.tags = TAGS     # memory that was freed
        self.deepen(level)

    def deepen(self, level: int) -> None:
        """Drop the weights at level 2."""
        if level == 2:
            self._loaded = None
            self.tags |= {"weights"}

    def free(self) -> None:
        """Return the memory that nothing refers to any more to the system."""
        gc.collect()
        self._device.release()

    def wake(self, tags: Collection[Tag]) -> AssembledEngine | None:
        """Load the weights, or make the KV cache, or both; return the engine once both are there, else None.

        Errors as in `assemble`: too little memory may be free now. ModelError if the files are of another model. After
        an error the engine sleeps as before.
        """
        left = self.tags - frozenset(tags)
        if left:
            if "weights" not in left and self._loaded is None and self._options.tensor_parallel_size == 1:
                self._loaded = load_alone(self._options)
            self.tags = left
            return None
        woken = assemble(
            self._options, loads_tokenizer=self._loads_tokenizer, loaded=self._loaded, tokenizer=self._tokenizer,
            member=self._member,
        )  # fmt: skip
        changed = _changed(self._ready, woken.ready)
        if changed:
            woken.close()
            raise ModelError(f"the files are of another model than before the sleep: {changed}")
        return woken


def _changed(before: Ready, after: Ready) -> str:
    """Return which figure of a model has another value now; empty if all are the same, or sequences may be longer."""
    most = min(before.limits.max_model_len, after.limits.max_model_len)
    after = structs.replace(after, limits=replace(after.limits, max_model_len=most))
    for name, value in structs.asdict(before).items():
        if (new := getattr(after, name)) != value:
            return f"{name} was {value!s:.100}, and is {new!s:.100}"
    return ""
