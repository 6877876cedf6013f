"""Repetition, presence and frequency penalties, computed anew from the known tokens at each draw.

Nothing is counted from step to step, so a sequence that was preempted and came back is penalized the same.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.ranking import row_chunks
from quire.decoding.state import SamplingState


def apply_penalties(
    state: SamplingState,
    logits: Tensor,
    samples: NDArray[np.int64],
    rows: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    num_tokens: NDArray[np.int64],
) -> None:
    """Edit the rows `samples` [num] of `logits` [num_samples, vocab] in place; rows and num_tokens [num] are theirs.

    repetition_penalty (Keskar et al. 2019): the logit of a token that stands in prompt or output is divided by it if
    positive, multiplied by it otherwise. Then frequency_penalty is taken off for each time that it stands in the
    output, and presence_penalty once if it does (OpenAI's definitions).
    """
    for part in row_chunks(len(samples), logits.shape[1]):
        _penalize(state, logits, samples[part], rows[part], token_ids, num_tokens[part])


def _penalize(
    state: SamplingState,
    logits: Tensor,
    samples: NDArray[np.int64],
    rows: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    num_tokens: NDArray[np.int64],
) -> None:
    """Do it for samples that are few enough to hold several copies of."""
    settings = state.settings[rows]
    tokens, is_output = _known_tokens(settings["num_prompt_tokens"], rows, token_ids, num_tokens)
    where = torch.from_numpy(samples).to(logits.device)
    at = torch.from_numpy(tokens).to(logits.device)  # [num, max_tokens]
    part = logits[where]
    counts = torch.zeros_like(part).scatter_add_(1, at, torch.from_numpy(is_output).to(part)).gather(1, at)
    values = part.gather(1, at)
    repetition, presence, frequency = (
        torch.from_numpy(settings[name].copy()).to(logits.device)[:, None]
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - presence * (counts > 0)
    logits[where] = part.scatter_(1, at, values)


def _known_tokens(
    num_prompt_tokens: NDArray[np.int32],
    rows: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    num_tokens: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the known tokens of each row [num, max_tokens], and 1 where one belongs to the output, else 0.

    Places past a row's tokens repeat its first token, which is known, so that the edit writes one value there twice.
    """
    positions = np.arange(num_tokens.max())
    tokens = token_ids[rows, : len(positions)].astype(np.int64)
    is_known = positions < num_tokens[:, None]
    is_output = is_known & (positions >= num_prompt_tokens[:, None])
    return np.where(is_known, tokens, tokens[:, :1]), is_output.astype(np.float32)
