"""The margin rule, for devices that round differently: a token may differ only where the reference is nearly tied.

An answer is within the margin when each of its tokens, after those before it, is one that logits no further than the
margin from the reference's could have given: the highest, or one drawn with the number that the seed gives. A beam is
when its score is that of its tokens: which beams stay may hang on a near-tie, and all that comes of them with it. The
reference is the model on the CPU in the same dtype, by the plainest ops. `turn_on` lets every `LLM` keep what was asked
next to what it answers; then `Answer`s are compared by this rule, and to the bit otherwise.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire import LLM, RequestOutput
from quire.core.arrays import dtype_name
from quire.core.plan import NewRow
from quire.core.sampling_params import branch_seed
from quire.core.sequence import Request
from quire.decoding.sampler import SamplingBatch, SamplingState, process_logits
from quire.kernels.reference.back_ends import REFERENCE
from quire.kernels.reference.sampling import SAMPLING
from quire.kernels.sampling import uniforms
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import load_model

MARGINS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}  # distance of logits
BLOCK_SIZE = 16


class Asked(NamedTuple):
    """What an answer answers."""

    folder: Path
    dtype: str
    request: Request

    @property
    def margin(self) -> float:
        return MARGINS[self.dtype]


asked_for: dict[int, tuple[RequestOutput, Asked]] = {}  # keyed by the id of the output, which is kept alive


def turn_on(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let every `LLM` made from now on keep what was asked."""
    initialize, run = LLM.__init__, LLM._run

    def keep_folder(llm: LLM, model: Any = None, **settings: Any) -> None:  # noqa: ANN401 (as in LLM)
        initialize(llm, model, **settings)
        llm.folder = Path(model)  # type: ignore[attr-defined]

    def keep_asked(llm: LLM, requests: list[Any], kind: Any) -> Iterator[RequestOutput]:  # noqa: ANN401
        dtype = dtype_name(llm._engine.model.dtype)
        by_id = {str(each.request.request_id): each.request for each in requests}
        for output in run(llm, requests, kind):
            request = by_id[output.request_id]
            asked_for[id(output)] = output, Asked(llm.folder, dtype, request)  # type: ignore[attr-defined]
            yield output

    replace(LLM, "__init__", keep_folder)
    replace(LLM, "_run", keep_asked)


def beyond_margin(asked: Asked, index: int, tokens: list[int], margin: float | None = None) -> list[int]:
    """Return the places in branch `index` of an answer whose tokens the margin does not allow."""
    request, margin = asked.request, asked.margin if margin is None else margin
    prompt, seed = list(request.prompt_token_ids), branch_seed(request.seed, index)
    known, logits = np.array([prompt + tokens], np.int32), _logits_of_answer(asked, tokens)
    state = SamplingState(1, logits.shape[1])
    ends, bad_words = request.eos_token_ids, request.bad_words_token_ids
    state.set(NewRow(0, [], len(prompt), [], request.params, seed, ends, bad_words))
    numbers = uniforms(np.full(len(tokens), seed, np.uint64), np.arange(len(tokens)))
    beyond = []
    for place, (token, number) in enumerate(zip(tokens, numbers.tolist(), strict=True)):
        samples = SamplingBatch.of(state, np.array([0]), known, np.array([len(prompt) + place]))
        own = logits[place : place + 1].clone()
        process_logits(samples, own, SAMPLING)
        values = own[0].double().numpy()
        if request.params.temperature == 0:
            is_allowed = values.max() - values[token] <= margin
        else:
            is_allowed = _may_draw(values, token, samples.settings()[0], number, margin)
        if not is_allowed:
            beyond.append(place)
    return beyond


def _may_draw(logits: NDArray[np.float64], token: int, settings: np.void, number: float, margin: float) -> bool:
    """Whether logits no further than `margin` from these may give the token for a number in [0, 1)."""
    scaled = (logits - logits.max()) / float(settings["temperature"])
    margin /= float(settings["temperature"])
    is_sure = scaled >= _cut(scaled, settings, margin) + 2 * margin   # kept whatever the error
    may_stay = scaled >= _cut(scaled, settings, -margin) - 2 * margin
    least, most = np.where(is_sure, np.exp(scaled - margin), 0.0), np.where(may_stay, np.exp(scaled + margin), 0.0)
    lowest = least[:token].sum() / (least[:token].sum() + most[token:].sum())
    highest = most[: token + 1].sum() / (most[: token + 1].sum() + least[token + 1 :].sum())
    return bool(may_stay[token] and lowest <= number <= highest)


def _cut(scaled: NDArray[np.float64], settings: np.void, margin: float) -> float:
    """Return the lowest scaled logit that min_p, top_k and top_p keep; a margin above 0 keeps less."""
    ranked = np.sort(scaled)[::-1]
    kept = ranked[ranked >= float(settings["log_min_p"]) + 2 * margin][: settings["top_k"]]
    if settings["top_p"] < 1:
        shares = np.cumsum(np.exp(kept)) / np.exp(kept).sum()
        kept = kept[: 1 + np.searchsorted(shares, max(0.0, float(settings["top_p"]) - 2 * margin))]
    return float(kept[-1] if len(kept) else ranked[0])


def beam_score(asked: Asked, tokens: list[int]) -> float:
    """Return the sum of the logprobs of a beam's tokens."""
    logits, temperature = _logits_of_answer(asked, tokens), asked.request.params.temperature
    logprobs = (logits / (temperature or 1.0)).double().log_softmax(dim=1)
    return float(logprobs[range(len(tokens)), tokens].sum())


def _logits_of_answer(asked: Asked, tokens: list[int]) -> Tensor:
    """Return float32 logits [num_tokens, vocab], those that each token of an answer was chosen from."""
    prompt = list(asked.request.prompt_token_ids)
    logits = _logits(_model(asked.folder, asked.dtype), np.array(prompt + tokens[:-1], np.int32))
    return logits[len(prompt) - 1 :]


@cache
def _model(folder: Path, dtype: str) -> Decoder:
    return load_model(folder, dtype=dtype, back_end=REFERENCE)


@torch.inference_mode()
def _logits(model: Decoder, token_ids: NDArray[np.int32]) -> Tensor:
    """Return float32 logits [num_tokens, vocab] of one sequence."""
    count = len(token_ids)
    num_blocks = -(-count // BLOCK_SIZE)
    cache = KVCache.allocate(model.kv_geometry, num_blocks, BLOCK_SIZE, model.back_end)
    batch = ForwardBatch(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        positions=torch.arange(count),
        slot_mapping=torch.arange(count),
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
    )
    return model.logits(model.forward(batch, cache)).clone()
