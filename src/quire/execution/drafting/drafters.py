"""Door of the room: the drafter that a configuration asks for."""

from quire.core.errors import ConfigError
from quire.core.speculation import SpeculationConfig
from quire.execution.batch import PersistentBatch
from quire.execution.drafter import Drafter
from quire.execution.drafting.lengths import FixedLength
from quire.execution.drafting.limited import LimitedDrafter
from quire.execution.drafting.ngram import NgramDrafter


def make_drafter(config: SpeculationConfig, batch: PersistentBatch) -> Drafter:
    """Return the drafter for the rows of a batch. Raises ConfigError for a method that is not there yet."""
    if config.method != "ngram":
        raise ConfigError(f"speculative_config: the method {config.method} is not supported yet")
    method = NgramDrafter(batch.token_ids, config.prompt_lookup_min, config.prompt_lookup_max)
    return LimitedDrafter(method, FixedLength(config.num_speculative_tokens), len(batch.token_ids))
