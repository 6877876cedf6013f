"""Sampling in C++ against plain float64, and to the bit among other rows, on other threads and instruction sets."""

import numpy as np
import pytest
import torch

from quire.extension import _kernels
from quire.kernels.reference import sampling
from quire.kernels.sampling import Penalties, num_words
from quire.kernels.sampling import uniforms as philox_uniforms
from support.cpp_kernels import choose_tokens, mask_logits, penalize, top_logprobs, uniforms
from support.draws import draws_of

VOCAB_SIZES = [1, 2, 16, 17, 1000, 1025, 20_011]
LARGEST_UNIFORM = 1 - 2.0**-53
TINY = np.finfo(np.float32).tiny  # the lowest temperature


def make_rows(vocab_size: int) -> dict[str, np.ndarray]:
    """Return rows of one vocabulary, float32, each of which has a distribution."""
    rng = np.random.default_rng(vocab_size)
    normal = rng.normal(0, 1, vocab_size).astype(np.float32)
    one_finite = np.full(vocab_size, -np.inf, np.float32)
    one_finite[vocab_size // 2] = -7
    rows = {
        "normal": normal,
        "peaked": normal * 8,
        "almost flat": normal * np.float32(1e-6) + 5,
        "bfloat16": torch.from_numpy(normal * 3).bfloat16().float().numpy(),
        "two values": np.sign(normal) * np.float32(0.5),
        "zeros of both signs": np.copysign(np.float32(0), normal),
        "one finite": one_finite,
        "many forbidden": np.where(rng.random(vocab_size) < 0.9, -np.inf, normal).astype(np.float32),
        "huge": normal * np.float32(5e37),
        "subnormal": normal * np.float32(1e-40),
        "geometric": np.exp2(-(np.arange(vocab_size) % 140)).astype(np.float32) * np.sign(normal),
        "rising": np.arange(vocab_size, dtype=np.float32) / np.float32(vocab_size),
        "peak at the end": np.append(normal[1:], np.float32(30)),
    }
    rows["many forbidden"][0] = 0
    return rows


def weights_in_order(row: np.ndarray, temperature: float, log_min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens by rank and their weights, float64."""
    with np.errstate(over="ignore"):
        scaled = ((row - row.max()) / np.float32(temperature)).astype(np.float64)
    weights = np.where(scaled < log_min_p, 0, np.exp(scaled))
    order = np.argsort(-row, kind="stable")
    return order, weights[order]


def draw(row: np.ndarray, uniform: float, **settings: float) -> int:
    """Draw once from one row."""
    return draw_all(row[None], np.array([uniform]), **settings)[0]


def draw_all(
    rows: np.ndarray,
    numbers: np.ndarray,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> list[int]:
    """Draw from each row with the same settings."""
    num, vocab_size = rows.shape
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.float64(min_p))
    draws = draws_of(
        np.full(num, temperature, np.float32),
        np.full(num, log_min_p, np.float32),
        np.full(num, top_k or vocab_size, np.int32),
        np.full(num, top_p, np.float64),
        numbers,
    )
    return choose_tokens(torch.from_numpy(rows), draws).tolist()


def check_draws(row: np.ndarray, kept: np.ndarray, weights: np.ndarray, **settings: float) -> None:
    """Check that just the tokens `kept` are drawn, each in its part of [0, 1), which stand in the order of ids."""
    by_id = np.argsort(kept)
    kept, weights = kept[by_id], weights[by_id]
    possible = np.flatnonzero(weights)
    for place, number in ((possible[0], 0.0), (possible[-1], LARGEST_UNIFORM)):
        if weights[place] > 1e-12 * weights.sum():  # else rounding may hide it
            assert draw(row, number, **settings) == kept[place]
    ends = np.cumsum(weights) / weights.sum()
    wide = np.flatnonzero(weights > 1e-5 * weights.sum())
    for i in wide[:: 1 + len(wide) // 8]:
        middle = ends[i] - weights[i] / weights.sum() / 2
        assert draw(row, middle, **settings) == kept[i]


@pytest.mark.parametrize("temperature", [TINY, 0.3, 1.0, 2.5, 3e38])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draws_follow_the_weights_in_the_order_of_ids(vocab_size: int, temperature: float) -> None:
    for row in make_rows(vocab_size).values():
        order, weights = weights_in_order(row, temperature, -np.inf)
        check_draws(row, order, weights, temperature=temperature)


@pytest.mark.parametrize("min_p", [1e-300, 1e-4, 0.3, 1.0])
def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest(min_p: float) -> None:
    for vocab_size in VOCAB_SIZES:
        for name, row in make_rows(vocab_size).items():
            if name in ("almost flat", "subnormal") and min_p == 1:
                continue  # equal in probability, or not, by rounding
            order, weights = weights_in_order(row, 0.7, np.float32(np.log(min_p)))
            check_draws(row, order, weights, temperature=0.7, min_p=min_p)


@pytest.mark.parametrize("top_k", [1, 2, 50, 129, 700, 9000])
def test_top_k_keeps_the_first_of_the_order_ties_by_id(top_k: int) -> None:
    for vocab_size in VOCAB_SIZES:
        for row in make_rows(vocab_size).values():
            order, weights = weights_in_order(row, 1.5, -np.inf)
            check_draws(row, order[:top_k], weights[:top_k], temperature=1.5, top_k=min(top_k, vocab_size))


@pytest.mark.parametrize("top_k", [0, 1, 100, 1500])
@pytest.mark.parametrize("share", [0, 1e-3, 0.5, 0.99])
def test_top_p_keeps_the_fewest_whose_weights_reach_it(share: float, top_k: int) -> None:
    for vocab_size in VOCAB_SIZES:
        for row in make_rows(vocab_size).values():
            count = min(top_k or vocab_size, vocab_size)
            order, weights = weights_in_order(row, 1.2, -np.inf)
            sums = np.cumsum(weights[:count])
            num_kept = 1 + int(share * (np.count_nonzero(weights[:count] > 1e-5 * sums[-1]) - 1))
            top_p = (sums[num_kept - 1] - weights[num_kept - 1] / 2) / sums[-1]  # far from both borders
            settings = {"temperature": 1.2, "top_p": top_p, "top_k": count}
            check_draws(row, order[:num_kept], weights[:num_kept], **settings)


def test_the_smallest_top_p_and_top_k_one_are_greedy_and_the_largest_top_p_keeps_nearly_all() -> None:
    for vocab_size in VOCAB_SIZES:
        for row in make_rows(vocab_size).values():
            for settings in ({"top_p": 5e-324}, {"top_k": 1}, {"top_k": 1, "top_p": 5e-324}):
                for number in (0.0, 0.5, LARGEST_UNIFORM):
                    assert draw(row, number, **settings) == row.argmax()
            assert row[draw(row, 0.7, top_p=LARGEST_UNIFORM)] > -np.inf


def test_it_chooses_what_the_plain_op_chooses() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (300, 5000)).astype(np.float32)
    draws = draws_of(
        rng.choice([0, 0.5, 1, 1.5], 300).astype(np.float32),
        np.log(rng.choice([1e-300, 0.1], 300)).astype(np.float32),
        rng.choice([3, 60, 2000, 5000], 300).astype(np.int32),
        rng.choice([0.3, 0.95, 1.0], 300),
        rng.random(300),
    )
    found, expected = (op(torch.from_numpy(logits), draws) for op in (choose_tokens, sampling.choose_tokens))
    assert np.count_nonzero(found != expected) <= 1  # a number within 1e-6 of a border


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_is_the_first_of_the_highest_and_the_first_nan(vocab_size: int) -> None:
    rows = [*make_rows(vocab_size).values(), np.full(vocab_size, -np.inf, np.float32), np.zeros(vocab_size, np.float32)]
    negative_nan = np.array([0xFFC00000], np.uint32).view(np.float32)
    for value in (np.nan, negative_nan, np.inf):
        for places in ([0], [-1], [vocab_size // 2, -1]):
            rows.append(rows[0].copy())
            rows[-1][places] = value
    logits = np.stack(rows)
    assert choose_tokens(torch.from_numpy(logits)).tolist() == logits.argmax(axis=1).tolist()
    assert draw_all(logits, np.full(len(rows), 0.9), temperature=0) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 900, "top_p": 0.1}])
def test_rows_without_a_distribution_give_some_token(settings: dict[str, float]) -> None:
    rows = np.random.default_rng(0).normal(0, 3, (5, 2000)).astype(np.float32)
    rows[0] = np.nan
    rows[1, 700:] = -np.nan
    rows[2, 3] = np.inf
    rows[3] = -np.inf
    rows[4] = np.inf
    assert all(0 <= token < 2000 for token in draw_all(rows, np.full(5, LARGEST_UNIFORM), **settings))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logprobs_and_ranks_are_those_of_the_plain_op(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    rows = list(make_rows(vocab_size).values())
    rows += [np.where(rng.random(vocab_size) < 0.1, np.nan, rows[0]).astype(np.float32), -rows[0] * np.inf]
    logits = torch.from_numpy(np.stack(rows))
    picked = np.repeat(np.arange(len(rows))[::-1], 3)
    tokens = rng.integers(0, vocab_size, len(picked))
    tokens[::5] = logits.numpy()[picked[::5]].argmax(axis=1)
    counts = np.minimum(rng.choice([0, 1, 5, 200, 3000, vocab_size], len(picked)), vocab_size)
    found = top_logprobs(logits, picked, tokens, counts)
    expected = sampling.top_logprobs(logits, picked, tokens, counts)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.ranks.tolist() == expected.ranks.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=2e-6, atol=4e-6)


def everything(logits: torch.Tensor, picked: np.ndarray) -> list[bytes]:
    """Return the bits of all that can be asked about some rows, in settings that follow from the row."""
    rows, vocab_size = logits[torch.from_numpy(picked)], logits.shape[1]
    draws = draws_of(
        np.float32([0, 0.6, 1, 3])[picked % 4],
        np.float32([-np.inf, -3])[picked % 2],
        np.minimum([vocab_size, 3, 400], vocab_size).astype(np.int32)[picked % 3],
        np.float64([1, 0.9, 0.5])[picked // 3 % 3],
        philox_uniforms(picked.astype(np.uint64), picked),
    )
    tokens = choose_tokens(rows, draws)
    answer = top_logprobs(rows, np.arange(len(picked)), tokens, np.full(len(picked), min(4, vocab_size)))
    return [b"".join(part[i].tobytes() for part in (tokens[:, None], *answer)) for i in range(len(picked))]


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("vocab_size", [2, 1025, 20_011])
def test_rows_have_the_same_bits_among_any_others(vocab_size: int, num_threads: int) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(np.stack([row for row in make_rows(vocab_size).values() for _ in range(6)]))
    alone = [everything(logits, np.array([row]))[0] for row in range(len(logits))]
    for _ in range(3):
        company = rng.permutation(len(logits))[: rng.integers(2, len(logits))]
        assert everything(logits, company) == [alone[row] for row in company]


@pytest.mark.parametrize("vocab_size", [2, 1025, 20_011])
def test_every_instruction_set_gives_the_same_bits(isa: str, vocab_size: int) -> None:
    logits = torch.from_numpy(np.stack([row for row in make_rows(vocab_size).values() for _ in range(6)]))
    found = everything(logits, np.arange(len(logits)))
    _kernels.use_isa("portable")
    assert found == everything(logits, np.arange(len(logits)))


def test_rows_may_be_far_apart_or_one_and_the_same() -> None:
    wide = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (6, 100)).astype(np.float32))
    for logits in (wide[:, 10:60], wide[::2], wide[:, ::2], wide[:1].expand(4, -1)):
        assert choose_tokens(logits).tolist() == logits.argmax(dim=1).tolist()


def test_no_rows_give_nothing() -> None:
    assert choose_tokens(torch.empty(0, 5)).shape == (0,)
    none = np.empty(0, dtype=np.int64)
    assert top_logprobs(torch.empty(0, 5), none, none, none).token_ids.shape == (0, 1)


@pytest.mark.parametrize(("name", "value"), [("rows", 3), ("rows", -1), ("tokens", 50), ("counts", 51), ("counts", -1)])
def test_what_points_outside_is_refused(name: str, value: int) -> None:
    arguments = {"rows": np.array([0, 1]), "tokens": np.array([0, 49]), "counts": np.array([0, 50])}
    top_logprobs(torch.zeros(3, 50), **arguments)
    arguments[name][1] = value
    with pytest.raises(AssertionError):
        top_logprobs(torch.zeros(3, 50), **arguments)


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
def test_penalties_are_the_plain_ones_to_the_bit(num_threads: int) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (9, 500)).astype(np.float32))
    logits[:, 7] = -torch.inf
    token_ids = rng.integers(0, 60, (12, 300)).astype(np.int32)
    num_tokens = np.array([1, 2, 300, 300, 40, 9])
    arguments = Penalties(
        np.array([8, 0, 3, 4, 7, 1]),
        token_ids,
        rng.permutation(12)[:6],
        num_tokens,
        np.array([1, 1, 1, 299, 20, 9]),
        np.array([1.0, 1e-20, 1.3, 0.7, 100, 1.1], np.float32),
        np.array([0, 0.3, -2, 1.1, 0.1, 2], np.float32),
        np.array([0.7, 0, 1.9, -0.3, 0.1, 1], np.float32),
    )
    expected = logits.clone()
    sampling.penalize(expected, arguments)
    for _ in range(2):  # the second time on counts that the first one left
        found = logits.clone()
        penalize(found, arguments)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 31, 33, 96, 1025, 20_011])
def test_masks_are_the_plain_ones_to_the_bit(isa: str, vocab_size: int, num_threads: int) -> None:
    rng = np.random.default_rng(0)
    wide = torch.from_numpy(rng.normal(0, 2, (9, vocab_size + 7)).astype(np.float32))
    wide[3, vocab_size // 2 :] = torch.nan
    rows = np.array([8, 0, 3, 4, 7])
    bits = rng.integers(0, 2**32, (5, num_words(vocab_size) + 1), dtype=np.uint32)
    bits[1], bits[2, ::2], bits[3, 1::3], bits[4] = 0, 0, 2**32 - 1, 2**32 - 1
    expected = wide.clone()
    sampling.mask_logits(expected[:, 3:-4], rows, bits)
    found = wide.clone()
    mask_logits(found[:, 3:-4], rows, bits)
    assert found.numpy().tobytes() == expected.numpy().tobytes()  # what lies around the rows, too
    is_allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size] > 0
    assert (found[rows, 3:-4].isneginf().numpy() == ~is_allowed).all()


def test_masks_that_do_not_fit_are_refused() -> None:
    logits, bits = torch.zeros(3, 50), np.zeros((1, 2), np.uint32)
    mask_logits(logits, np.array([2]), bits)
    for rows, masks in (([3], bits), ([-1], bits), ([0, 1], bits), ([0], bits[:, :1]), ([0], bits.view(np.int32))):
        with pytest.raises(AssertionError):
            mask_logits(logits, np.array(rows), masks)
    mask_logits(logits, np.zeros(0, np.int64), bits[:0])


def test_uniforms_are_philoxs() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 1000, dtype=np.uint64)
    indices = rng.integers(0, 2**40, 1000)
    assert (uniforms(seeds, indices) == philox_uniforms(seeds, indices)).all()
