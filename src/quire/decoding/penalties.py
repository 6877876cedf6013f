"""Repetition, presence and frequency penalties, computed anew from the known tokens at each draw.

Nothing is counted from step to step, so a sequence that was preempted and came back is penalized the same.
"""

from torch import Tensor

from quire.decoding.samples import Samples
from quire.decoding.state import PENALTIES
from quire.kernels.sampling import SamplingOps


def apply_penalties(samples: Samples, logits: Tensor, ops: SamplingOps) -> None:
    """Edit `logits` [num_samples, vocab] in place, in the rows of samples that use a penalty."""
    penalized = samples.using(PENALTIES)
    if not penalized.size:
        return
    among = samples.take(penalized)
    settings = among.settings()
    ops.penalize(
        logits,
        penalized,
        among.token_ids,
        among.rows,
        among.num_tokens,
        settings["num_prompt_tokens"],
        settings["repetition_penalty"],
        settings["presence_penalty"],
        settings["frequency_penalty"],
    )
