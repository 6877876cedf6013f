"""Bounds of the history, and its privacy: a client learns nothing of the requests of other clients."""

import tracemalloc

import pytest

from quire.core.image_processing import PreparedImage
from quire.core.images import PromptImage
from quire.core.outputs import CompletionOutput, Preemption, RequestMetrics
from quire.core.token_ids import pack_tokens
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.server import history as module
from quire.server.errors import ApiError
from quire.server.history import History, Miss, PastRequest
from quire.server.inspect.explain_routes import explain_misses
from quire.server.limits.fair_semaphore import MAX_SLICE_UNITS

SIZE = 4
PROMPT = list(range(10, 30))


def is_known(history: History, call_id: str, key_number: int) -> bool:
    try:
        return bool(history.find(call_id, key_number))
    except ApiError:
        return False


class Past:
    """A history with a clock: each call begins and ends a second after the one before."""

    def __init__(self) -> None:
        self.history, self._now_s = History(1 << 20), 0.0

    def add(
        self, prompt: list[int], *, found: int = 0, key: int = 1, salt: str | None = None, answer: tuple[int, ...] = (),
        name: str = "", engine: int = 0, images: tuple[PromptImage, ...] = (),
    ) -> PastRequest:  # fmt: skip
        self._now_s += 1
        metrics = RequestMetrics(self._now_s, self._now_s, self._now_s + 0.5, num_cached_tokens=found, engine=engine)
        request = PastRequest(TokenizedPrompt("text", pack_tokens(prompt), salt, key, images=images), metrics)
        name = name or str(self._now_s)
        self.history.add(name, [request])
        request.append(CompletionOutput(0, "", list(answer)))
        self.history.finish(name)
        return request

    def miss(self, prompt: list[int], **settings: object) -> Miss | None:
        return self.explain(self.add(prompt, **settings))  # type: ignore[arg-type]

    def explain(self, *requests: PastRequest) -> Miss | None:
        """Return why the first of a call's requests missed."""
        search = explain_misses(self.history, requests, SIZE)
        for _ in search.run():
            pass
        return search.miss(0)


@pytest.fixture
def past() -> Past:
    return Past()


def test_first_of_its_kind_was_never_seen(past: Past) -> None:
    past.add([1, *PROMPT])
    assert past.miss(PROMPT) == Miss(0, 0, "never_seen")


def test_what_was_there_has_been_evicted(past: Past) -> None:
    past.add(PROMPT)
    assert past.miss(PROMPT, found=8) == Miss(8, 2, "evicted")


def test_an_image_is_another_prefix_than_one_of_its_size(past: Past) -> None:
    one, other = (PromptImage(0, 8, serial, PreparedImage(2, 4, (2, 4), b"pixels")) for serial in (1, 2))
    assert past.miss(PROMPT, images=(one,)) == Miss(0, 0, "never_seen")
    assert past.miss(PROMPT, images=(other,)) == Miss(0, 0, "never_seen")
    again = past.add(PROMPT, images=(one,))
    assert past.explain(again) == Miss(0, 0, "evicted")
    assert (again.has_images, again.prompt.images) == (True, ())


def test_the_same_under_another_salt_of_the_same_key(past: Past) -> None:
    past.add(PROMPT, salt="a")
    assert past.miss(PROMPT, salt="b") == Miss(0, 0, "other_salt")
    assert past.miss(PROMPT) == Miss(0, 0, "other_salt")
    assert past.miss(PROMPT, salt="b") == Miss(0, 0, "evicted")


def test_the_same_on_another_engine(past: Past) -> None:
    past.add(PROMPT, engine=1)
    assert past.miss(PROMPT) == Miss(0, 0, "other_engine")
    assert past.miss(PROMPT) == Miss(0, 0, "evicted")
    assert past.miss(PROMPT, salt="b", engine=1) == Miss(0, 0, "other_salt")


@pytest.mark.parametrize("salt", [None, "a"])
def test_nothing_of_another_key_is_told(past: Past, salt: str | None) -> None:
    past.add(PROMPT, key=2, salt=salt)
    past.add(PROMPT, key=0, salt=salt)
    assert past.miss(PROMPT, salt="a") == Miss(0, 0, "never_seen")


def test_without_keys_nothing_of_another_salt_is_told(past: Past) -> None:
    past.add(PROMPT, key=0, salt="a")
    assert past.miss(PROMPT, key=0, salt="b") == Miss(0, 0, "never_seen")
    assert past.miss(PROMPT, key=0, salt="a") == Miss(0, 0, "evicted")


def test_a_whole_prompt_and_one_that_nobody_looked_for_miss_nothing(past: Past) -> None:
    past.add(PROMPT)
    assert past.miss(PROMPT, found=len(PROMPT) - 1) is None
    request = past.add(PROMPT)
    request.reads_cache = False
    assert past.explain(request) is None
    request = past.add(PROMPT)
    request.metrics.first_scheduled_s = None
    assert past.explain(request) is None


def test_answers_are_in_the_cache_too_but_for_their_last_token_and_a_block_that_is_not_full(past: Past) -> None:
    past.add(PROMPT[:6], answer=tuple(PROMPT[6:13]))
    assert past.miss(PROMPT, found=6) == Miss(6, 1, "evicted")
    assert past.miss([*PROMPT[:8], *PROMPT[8:12], 7, 7], found=11) == Miss(11, 2, "evicted")
    past.history = History(1 << 20)
    past.add(PROMPT[:6], answer=tuple(PROMPT[6:12]))
    assert past.miss(PROMPT, found=8) == Miss(8, 2, "never_seen"), "of 12 tokens the last was not computed"


def test_only_the_owner_finds_a_call(past: Past) -> None:
    past.add(PROMPT, key=2, name="cmpl-1")
    assert past.history.find("cmpl-1", 2)
    for call_id, key in (("cmpl-1", 1), ("cmpl-1", 0), ("cmpl-2", 2)):
        assert not is_known(past.history, call_id, key)


def test_calls_are_few(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CALLS", 3)
    for number in range(5):
        past.add(PROMPT, name=f"cmpl-{number}")
    assert [is_known(past.history, f"cmpl-{number}", 1) for number in range(5)] == [False] * 2 + [True] * 3


def test_bytes_are_bounded(past: Past) -> None:
    past.history = History(8_000)
    for number in range(4):
        past.add(PROMPT, answer=(1,) * 100, name=f"cmpl-{number}")
    assert 1 < len(past.history) < 4
    assert past.history.num_bytes <= 10_000
    past.add(PROMPT, answer=(1,) * 9000, name="long")
    assert (len(past.history), past.history.num_bytes) == (0, 0), "one that is too long by itself is not kept"
    past.add(PROMPT, name="short")
    assert past.history.find("short", 1)


def test_bytes_are_those_of_the_objects() -> None:
    """64 calls of 128 short prompts with 2 branches: what they take is not tokens."""
    history = History(1 << 30)
    tracemalloc.start()
    for call in range(64):
        requests = []
        for number in range(128):
            metrics = RequestMetrics(1.5 + number, 2.5, 3.5, 4.5 + call, preemptions=[Preemption(1.0 + number)])
            past = PastRequest(TokenizedPrompt(None, pack_tokens([call, number, 7]), "salt", 1), metrics)
            for index in range(2):
                past.append(CompletionOutput(index, "", [5] * 20, finish_reason="length"))
            requests.append(past)
        history.add(f"call-{call}", requests)
        history.finish(f"call-{call}")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * history.num_bytes < held < history.num_bytes


def test_explaining_costs_one_pass_however_many_prompts_ask(past: Past) -> None:
    """64 calls of 64 prompts, one of which is explained: units of work, and of them between two turns."""
    past.history = History(1 << 30)
    for call in range(64):
        requests = []
        for number in range(64):
            metrics = RequestMetrics(0.0, float(call), call + 0.5)
            requests.append(PastRequest(TokenizedPrompt(None, pack_tokens([number % 8] * 20), None, 1), metrics))
        past.history.add(f"call-{call}", requests)
    requests = list(past.history.find("call-63", 1))
    search = explain_misses(past.history, requests, SIZE)
    num_slices = sum(1 for _ in search.run())
    assert num_slices <= 64 * 64 * 6 // MAX_SLICE_UNITS + 1, "a unit for each request and block"
    assert [search.miss(number) for number in range(64)] == [Miss(0, 0, "evicted")] * 64


def test_all_prompts_of_a_call_are_explained_at_once(past: Past) -> None:
    past.add(PROMPT)
    past.add(PROMPT[4:], salt="other")
    prompts = [PROMPT, PROMPT[4:], PROMPT[8:], PROMPT[:2]]
    requests = [past.add(prompt) for prompt in prompts]
    search = explain_misses(past.history, requests, SIZE)
    assert [each is None for each in search.run()].count(False) == 0
    reasons = [None if (miss := search.miss(number)) is None else miss.reason for number in range(4)]
    assert reasons == ["evicted", "other_salt", "never_seen", "evicted"]


def test_neither_text_nor_a_second_copy_of_the_prompt_is_kept(past: Past) -> None:
    request = past.add(PROMPT)
    assert (request.prompt.text, list(request.prompt.token_ids)) == (None, [])
    assert (request.num_prompt_tokens, len(request.prompt_tokens)) == (len(PROMPT), 4 * len(PROMPT))
