"""What is found in the cache changes no bit: tokens and logprobs equal those of the request alone, cache off."""

import random
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from support.answers import Answer, answers_of, have_equal_prompt_logprobs

DTYPES = ("float32", "bfloat16")
MAX_MODEL_LEN = 256
NUM_TOKENS = 10
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.95},
    {"temperature": 0.7, "seed": 6, "n": 4},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
)


def random_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


PREFIX = random_tokens(1, 200)


def prompt_that_hits(num_common: int, length: int) -> list[int]:
    """A prompt that begins like PREFIX, for `num_common` tokens, and then goes its own way."""
    return [*PREFIX[:num_common], *random_tokens(num_common, length - num_common)]


def prompts_for(block_size: int) -> list[list[int]]:
    """Hits at 0, 1 and k blocks, inside of a block, of a single token, and of the whole prompt, on a border and not."""
    size, k = block_size, max(1, 128 // block_size)
    common = [0, 1, size - 1, size, size + 1, size + size // 2, k * size, k * size + 3]
    prompts = [prompt_that_hits(num, num + 7) for num in common if num + 7 <= 200]
    return [*prompts, PREFIX[:size], PREFIX[: k * size], PREFIX[: size + 1], PREFIX[: k * size - 1]]


class Model:
    """A model, and what each prompt gives alone and with the cache off; each is asked once."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = str(folder), dtype
        self._alone: dict[tuple[tuple[int, ...], int, int], list[Answer]] = {}
        self._llm = self.llm(enable_prefix_caching=False)

    def llm(self, **options: Any) -> LLM:  # noqa: ANN401
        return LLM(self.folder, dtype=self.dtype, max_model_len=MAX_MODEL_LEN, **options)

    def alone(self, prompt: list[int], kind: int, num_tokens: int) -> list[Answer]:
        key = tuple(prompt), kind, num_tokens
        if key not in self._alone:
            (output,) = self._llm.generate([prompt], params_of(kind, num_tokens), use_tqdm=False)
            assert output.num_cached_tokens == 0
            self._alone[key] = answers_of(output)
        return self._alone[key]

    def close(self) -> None:
        self._llm.close()


def params_of(kind: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=2, **KINDS[kind % len(KINDS)])


MODELS = list(product(("demo_model", "stories260k"), DTYPES))


def in_turn(settings: list[tuple[int, int]]) -> list[tuple[tuple[str, str], tuple[int, int]]]:
    """Return each setting with one of the models; pairs of all are in `test_covering_table.py`."""
    return list(zip(cycle(MODELS), settings))


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    name, dtype = request.param
    model = Model(request.getfixturevalue(name), dtype)
    yield model
    model.close()


def ask(
    llm: LLM, prompts: list[list[int]], first_kind: int, num_tokens: int = NUM_TOKENS
) -> list[RequestOutput]:
    kinds = [params_of(first_kind + i, num_tokens) for i in range(len(prompts))]
    return llm.generate(prompts, kinds, use_tqdm=False)


def assert_exact(model: Model, outputs: list[RequestOutput], first_kind: int) -> None:
    for i, output in enumerate(outputs):
        num_tokens = len(output.outputs[0].token_ids)
        alone = model.alone(output.prompt_token_ids, (first_kind + i) % len(KINDS), num_tokens)
        assert answers_of(output) == alone, f"prompt {i}"


def check_setting(model: Model, block_size: int, budget: int, num_kv_blocks: int | None, first_kind: int) -> list[int]:
    """Ask a cold cache, then a warm one, one by one and all at once. Return how many tokens the warm one found."""
    prompts = prompts_for(block_size)
    options = {"block_size": block_size, "max_num_batched_tokens": budget, "num_kv_blocks": num_kv_blocks}
    with model.llm(**options) as llm:
        (cold,) = ask(llm, [PREFIX], first_kind)
        assert cold.num_cached_tokens == 0
        assert_exact(model, [cold], first_kind)
        found = []
        for i, prompt in enumerate(prompts):
            outputs = ask(llm, [prompt], first_kind + i)
            assert_exact(model, outputs, first_kind + i)
            found.append(outputs[0].num_cached_tokens)
        outputs = ask(llm, [PREFIX, *prompts, *prompts], first_kind)
        assert_exact(model, outputs, first_kind)
        stats = llm.kv_stats()
        assert (stats.used_blocks, stats.cached_blocks + stats.free_blocks) == (0, stats.total_blocks)
    with model.llm(**options) as llm:
        assert_exact(model, ask(llm, [*prompts, PREFIX], first_kind), first_kind)
    return found


SETTINGS = [(8, 1), (16, 2048), (16, 7), (64, 16), (128, 2048)]


@pytest.mark.parametrize(("model", "setting"), in_turn(SETTINGS), indirect=["model"], ids=str)
def test_hits_of_every_length_change_nothing(model: Model, setting: tuple[int, int]) -> None:
    block_size, budget = setting
    found = check_setting(model, block_size, budget, None, first_kind=0)
    size, k = block_size, max(1, 128 // block_size)
    common = [num for num in [0, 1, size - 1, size, size + 1, size + size // 2, k * size, k * size + 3] if num <= 193]
    stored = (len(PREFIX) + NUM_TOKENS - 1) // size * size
    expected = [min(num, stored) for num in [*common, size - 1, k * size - 1, size, k * size - 2]]
    assert all(tokens >= least for tokens, least in zip(found, expected, strict=True)), (found, expected)


@pytest.mark.parametrize(
    ("model", "setting"), in_turn([(8, 16), (16, 2048), (16, 16), (8, 2048)]), indirect=["model"], ids=str
)
def test_preempted_hits_change_nothing(model: Model, setting: tuple[int, int]) -> None:
    block_size, budget = setting
    num_blocks = (MAX_MODEL_LEN + 128) // block_size
    with model.llm(block_size=block_size, max_num_batched_tokens=budget, num_kv_blocks=num_blocks) as llm:
        prompts = [prompt_that_hits(num, num + 9) for num in range(40, 190, 10)]
        outputs = ask(llm, [PREFIX, *prompts], 0, num_tokens=40)
        assert_exact(model, outputs, 0)
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
        assert sum(output.num_cached_tokens for output in outputs) > 0


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("block_size", "budget"), list(product((8, 16, 32, 64, 128), (1, 7, 16, 2048))))
@pytest.mark.parametrize("spare_blocks", [0, 8, 1000])
def test_every_setting_gives_the_same_answers(model: Model, block_size: int, budget: int, spare_blocks: int) -> None:
    blocks_of_a_branch = 1 + -(-NUM_TOKENS // block_size)
    num_blocks = -(-MAX_MODEL_LEN // block_size) + 3 * blocks_of_a_branch + spare_blocks  # a prompt with four branches
    for first_kind in range(len(KINDS)):
        check_setting(model, block_size, budget, num_blocks, first_kind)


def test_next_turn_of_a_chat_reuses_the_last_answer(model: Model) -> None:
    with model.llm(block_size=8) as llm:
        known = PREFIX[:30]
        for turn in range(4):
            (output,) = ask(llm, [known], turn)
            assert_exact(model, [output], turn)
            assert output.num_cached_tokens >= (len(known) - 5 - 1) // 8 * 8 - (30 if turn == 0 else 0)
            known = [*known, *output.outputs[0].token_ids, *random_tokens(turn, 5)]


def test_prompt_logprobs_of_a_cached_prompt_are_all_there(model: Model) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1, logprobs=1)
    with model.llm(block_size=8) as llm, model.llm(enable_prefix_caching=False) as off:
        ask(llm, [PREFIX], 0)
        outputs = [each.generate([PREFIX], params, use_tqdm=False)[0] for each in (llm, off)]
    assert outputs[0].num_cached_tokens == 0
    assert have_equal_prompt_logprobs(*outputs)
    assert answers_of(outputs[0]) == answers_of(outputs[1])


def test_salts_share_nothing_and_change_nothing(model: Model) -> None:
    prompts: list[Any] = [{"prompt_token_ids": PREFIX, "cache_salt": salt} for salt in ("a", "b", "a")]
    with model.llm(block_size=8) as llm:
        outputs = [llm.generate([prompt], params_of(0), use_tqdm=False)[0] for prompt in [*prompts, PREFIX]]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 199, 0]
    assert all(answers_of(output) == model.alone(PREFIX, 0, NUM_TOKENS) for output in outputs)


def test_burst_computes_its_prefix_once(model: Model) -> None:
    prompts = [prompt_that_hits(160, 160 + 1 + i) for i in range(16)]
    with model.llm(block_size=16) as llm:
        outputs = ask(llm, prompts, 0)
        stats = llm.kv_stats()
    assert_exact(model, outputs, 0)
    assert [output.num_cached_tokens for output in outputs] == [0] + [160] * 15
    assert stats.prefix_hits_tokens == 15 * 160
    assert stats.prefix_queries_tokens == sum(len(prompt) for prompt in prompts)


@pytest.mark.parametrize(("block_size", "budget", "length"), [(8, 16, 61), (64, 2048, 90)])
def test_pinned_prefix_of_any_length_changes_nothing(
    model: Model, block_size: int, budget: int, length: int
) -> None:
    """Hits that end at the pin's end, inside of its last block, and the pin itself as a prompt; alone and together."""
    pin = PREFIX[:length]
    lengths = [length, length - 1, length // block_size * block_size + 1]
    prompts = [pin, *(prompt_that_hits(num, num + 5) for num in lengths)]
    with model.llm(block_size=block_size, max_num_batched_tokens=budget, num_kv_blocks=1024 // block_size) as llm:
        pinned = llm.pin_prefix(pin)
        assert llm.kv_stats().pinned_blocks == llm.kv_stats().used_blocks == pinned.num_blocks
        found = []
        for kind, prompt in product((0, 2), prompts):  # one branch, and four
            (output,) = outputs = ask(llm, [prompt], kind)
            assert_exact(model, outputs, kind)
            found.append(output.num_cached_tokens)
        assert found[:2] == [length - 1, length]
        llm.unpin_prefix(pinned.id)
        assert llm.kv_stats().used_blocks == 0
        assert_exact(model, ask(llm, prompts, 0), 0)


def test_pinned_prefix_survives_a_flood_and_preemptions(model: Model) -> None:
    pin = PREFIX[:85]
    with model.llm(block_size=8, num_kv_blocks=(MAX_MODEL_LEN + 128) // 8) as llm:
        llm.pin_prefix(pin)
        prompts = [random_tokens(100 + i, 80) for i in range(4)] + [prompt_that_hits(85, 92 + i) for i in range(3)]
        outputs = ask(llm, prompts, 0, num_tokens=40)
        assert_exact(model, outputs, 0)
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
        assert llm.kv_stats().evicted_blocks > 0
        (output,) = ask(llm, [[*pin, 3, 4]], 0)
        assert output.num_cached_tokens == 85
        assert_exact(model, [output], 0)
