"""Requests to a small model that keeps more of a sequence than keys and values, in every way of serving at once.

The right answer of each is that of the request alone in a plain engine: without prefix cache, drafts, preemption or
chunks.
"""

import os
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.outputs import KVStats
from quire.extension.isas import usable_isas
from quire.kernels.choice import choose_back_end
from quire.model.loader import load_model
from support.answers import Answer, answers_of
from support.oracle_drafter import let_draft
from support.paged_runner import PagedRunner
from support.poison import Poison, preempt_now_and_then
from support.server import wait_until
from support.threads import set_num_threads

ISAS = usable_isas() or ("auto",)
CASES = [(isa, "bfloat16") for isa in ISAS] + [(ISAS[0], "float32")]
VOCAB_SIZE = 96
ROUNDINGS = ("quantization", "kv_cache_dtype")  # settings that change what is computed
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 1, "top_p": 0.9, "presence_penalty": 0.5},
    {"seed": 2, "n": 3, "logprobs": 1},
    {"seed": 3, "top_k": 20, "prompt_logprobs": 1},
)


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that begin alike and end within blocks, of 1 to 90 tokens, and their parameters."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(60)]
    prompts = [
        [*shared[: rng.randrange(60)], *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30)))]
        for _ in range(10)
    ]
    params = [SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True, **KINDS[i % 4]) for i in range(10)]
    return prompts, params


@cache
def alone(model: Path, isa: str, dtype: str, **rounding: Any) -> list[list[Answer]]:  # noqa: ANN401 (those of LLM)
    """Return the answers of the requests, each alone in a plain engine. `rounding`: settings that change bits."""
    num_threads = torch.get_num_threads()
    with LLM(model, cpu_isa=isa, dtype=dtype, enable_prefix_caching=False, max_model_len=160, **rounding) as llm:
        set_num_threads(1)
        found = [answers_of(llm.generate([each], own, use_tqdm=False)[0]) for each, own in zip(*asked(), strict=True)]
    set_num_threads(num_threads)
    return found


def check_all_at_once(
    model: Path, isa: str, dtype: str, mode: str, method: str = "ngram", head: Path | None = None,
    **settings: Any,  # noqa: ANN401 (those of LLM)
) -> tuple[KVStats, Poison]:
    """Assert that all ways at once, with NaN in all that is free, change no bit; return the engine's counts.

    The requests are sent twice: what the first ones have left is there for the second. Drafts are an oracle's, beside
    those of a draft model where the method has one. `head`: the folder of an EAGLE-3 head.
    """
    rounding = {name: settings[name] for name in ROUNDINGS if name in settings}
    if settings.get("tensor_parallel_mode") == "reduce":  # the bits of as many ranks
        rounding |= {name: settings[name] for name in ("tensor_parallel_size", "tensor_parallel_mode")}
    expected, (prompts, params) = alone(model, isa, dtype, **rounding), asked()
    wholes = [prompt + list(answer.token_ids) for prompt, own in zip(prompts, expected, strict=True) for answer in own]
    drafts = {"method": method, "num_speculative_tokens": 4, "model": None if head is None else str(head)}
    with LLM(
        model, cpu_isa=isa, dtype=dtype, max_model_len=160, block_size=8, max_num_batched_tokens=23, max_num_seqs=12,
        num_kv_blocks=60, preemption_mode=mode, num_swap_blocks=90 if mode == "swap" else None,
        speculative_config=drafts, **settings,
    ) as llm:  # fmt: skip
        set_num_threads(1)
        drafter, poison = let_draft(llm, wholes), Poison(llm)
        poison.spread()
        preempt_now_and_then(llm._engine.engine.scheduler, stays_away=True)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            llm._engine.engine.scheduler.check()
            assert [answers_of(output) for output in outputs] == expected
        stats = llm.kv_stats()
    assert stats.used_blocks == stats.swap_used_blocks == 0
    assert stats.preemptions[mode] > 5
    assert stats.prefix_hits_tokens > 100
    assert 0 < drafter.num_accepted < drafter.num_verified
    return stats, poison


def check_apart(model: Path, isa: str, dtype: str, kv_port: int, **settings: Any) -> None:  # noqa: ANN401 (of LLM)
    """Assert that answers whose prompts two of three engines compute are right.

    The third decodes, in few blocks, with drafts and chunks. Nothing is kept for it at the end.
    """
    prompts, params = asked()
    host = f"127.{1 + os.getpid() // 65536 % 250}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"  # this process's own
    with LLM(
        model, cpu_isa=isa, dtype=dtype, max_model_len=160, block_size=8, max_num_batched_tokens=23,
        num_kv_blocks=3 * 24, speculative_config={"method": "ngram"}, data_parallel_size=3, prefill_engines=2,
        prefill_least_tokens=17, kv_host=host, kv_port=kv_port, **settings,
    ) as llm:  # fmt: skip
        wait_until(lambda: llm.kv_stats().transfer.get("peers_connected") == 2)
        num_fetched = 0
        for salt in "ab":
            salted: list[Any] = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
            outputs = llm.generate(salted, params, use_tqdm=False)
            assert [answers_of(output) for output in outputs] == alone(model, isa, dtype)
            num_fetched += sum(each.metrics.num_peer_tokens for each in outputs if each.metrics is not None)
        assert num_fetched > 0
        wait_until(lambda: holds_nothing(llm.kv_stats()))


def holds_nothing(stats: KVStats) -> bool:
    """Return whether no block and no slot of a state is in use, or kept for another engine."""
    states = stats.states.get("used_slots", 0), stats.states.get("kept_slots", 0)
    return not (stats.used_blocks or stats.transfer["held_blocks"] or any(states))


def check_near(model: Path, bound: float, **rounding: str) -> None:
    """Assert that rounded weights, keys and values change logprobs of prompts, and by less than a bound on average."""
    prompts, params = asked()[0], SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for settings in ({}, rounding):
        with LLM(model, dtype="float32", max_model_len=160, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        scores = [zip(each.prompt_token_ids[1:], (each.prompt_logprobs or [])[1:], strict=True) for each in outputs]
        found.append([each[token].logprob for own in scores for token, each in own if each is not None])
    differences = [abs(a - b) for a, b in zip(*found, strict=True)]
    assert 0 < sum(differences) / len(differences) < bound


def check_every_cut(model: Path, isa: str, dtype: str, **rounding: Any) -> None:  # noqa: ANN401 (those of ROUNDINGS)
    """Assert that 70 tokens, cut anywhere into two steps, have the bits of one step."""
    back_end = choose_back_end("cpu", isa=isa)
    decoder = load_model(model, dtype=dtype, back_end=back_end, max_positions=80, **rounding)
    tokens = [random.Random(5).randrange(VOCAB_SIZE) for _ in range(70)]
    runner = partial(PagedRunner, decoder, block_size=16, num_blocks=8)
    whole = runner().run("a", tokens, [70])
    for cut in range(1, 70):
        found = runner().run("a", tokens, [cut, 70 - cut])
        assert torch.equal(found, whole), f"cut at {cut}"
    choose_back_end("cpu", isa=ISAS[0])


def check_disk_and_sleep(model: Path, folder: Path, **rounding: Any) -> tuple[int, list[int]]:  # noqa: ANN401
    """Assert that an answer is one before and behind sleep, and from a disk tier in `folder` by a second engine.

    Return the number of tokens of its prompt, and how many of them each request but the first found in a cache.
    """
    prompt, params = asked()[0][1] * 2, SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    answers, cached = [], []
    for _ in range(2):
        with LLM(
            model, max_model_len=160, kv_disk_dir=folder, kv_disk_size="4MiB", num_kv_blocks=30, enable_sleep_mode=True,
            **rounding,
        ) as llm:
            for _ in range(2):
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                answers.append(answers_of(output))
                cached.append(output.num_cached_tokens)
                llm.sleep(level=1)
                llm.wake_up()
    assert all(each == answers[0] for each in answers)
    assert cached[0] == 0
    return len(prompt), cached[1:]


def check_beams(model: Path) -> None:
    """Assert that beams are those without a prefix cache, and leave nothing in use."""
    prompts, params = asked()[0][:3], BeamSearchParams(beam_width=4, max_tokens=20)
    found = []
    for caching in (False, True, True):
        with LLM(model, max_model_len=160, block_size=8, num_kv_blocks=80, enable_prefix_caching=caching) as llm:
            outputs = [llm.beam_search([prompt], params, use_tqdm=False)[0] for prompt in prompts * (1 + caching)]
            stats = llm.kv_stats()
            assert stats.used_blocks == stats.states.get("used_slots", 0) == 0
        found.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert found[1] == found[2] == found[0] * 2
