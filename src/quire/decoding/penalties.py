"""Repetition, presence and frequency penalties, computed anew from the known tokens at each draw.

Nothing is counted from step to step, so a sequence that was preempted and came back is penalized the same.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.ranking import row_chunks
from quire.decoding.samples import Samples
from quire.decoding.state import PENALTIES


def apply_penalties(samples: Samples, logits: Tensor) -> None:
    """Edit `logits` [num_samples, vocab] in place, in the rows of samples that use a penalty.

    repetition_penalty (Keskar et al. 2019): the logit of a token that stands in prompt or output is divided by it if
    positive, multiplied by it otherwise. Then frequency_penalty is taken off for each time that it stands in the
    output, and presence_penalty once if it does (OpenAI's definitions).
    """
    penalized = samples.using(PENALTIES)
    for part in row_chunks(len(penalized), logits.shape[1]):
        where = torch.from_numpy(penalized[part]).to(logits.device)
        logits[where] = _penalized(samples.take(penalized[part]), logits[where])


def _penalized(samples: Samples, logits: Tensor) -> Tensor:
    """Return `logits` [num_samples, vocab], changed in place, of samples few enough to hold several copies of."""
    settings = samples.settings()
    tokens, is_output = _known_tokens(samples)
    at = torch.from_numpy(tokens).to(logits.device)  # [num_samples, max_tokens]
    counts = torch.zeros_like(logits).scatter_add_(1, at, torch.from_numpy(is_output).to(logits)).gather(1, at)
    values = logits.gather(1, at)
    repetition, presence, frequency = (
        torch.from_numpy(settings[name].copy()).to(logits.device)[:, None]
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - presence * (counts > 0)
    return logits.scatter_(1, at, values)


def _known_tokens(samples: Samples) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the known tokens of each sample [num_samples, max_tokens], and 1 where one is of the output, else 0.

    Places past a sample's tokens repeat its first token, which is known, so that the edit writes one value there twice.
    """
    positions = np.arange(samples.num_tokens.max())
    tokens = samples.token_ids[samples.rows, : len(positions)].astype(np.int64)
    is_known = positions < samples.num_tokens[:, None]
    is_output = is_known & (positions >= samples.settings()["num_prompt_tokens"][:, None])
    return np.where(is_known, tokens, tokens[:, :1]), is_output.astype(np.float32)
