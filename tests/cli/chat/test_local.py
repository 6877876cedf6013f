"""A model in this process answers through its chat template, or goes on with the text where it has none."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cli.chat.chat_back_ends import CONTINUATION_MAX_TOKENS, LocalBackEnd, continued_text, postponed_interrupt
from quire.cli.chat.chat_history import ChatError, Update
from quire.core.errors import ContextLengthError
from support.interrupts import interruptible

SMALL = {"num_kv_blocks": 32, "max_num_seqs": 2, "max_model_len": 160}
TALK = [
    {"role": "user", "content": "Write a function parse_header."},
    {"role": "assistant", "content": "def parse_header(self):"},
    {"role": "user", "content": "What does read_file do?"},
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def base_llm(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Load a model that has no chat template."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(demo_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with LLM(folder, **SMALL) as llm:
        yield llm


def updates_of(back_end: LocalBackEnd, messages: list[dict[str, str]]) -> list[Update]:
    updates: list[Update] = []
    back_end.answer(messages, updates.append)
    return updates


def test_answer_is_what_chat_gives(llm: LLM) -> None:
    [expected] = llm.chat(TALK, GREEDY, use_tqdm=False)
    updates = updates_of(LocalBackEnd(llm, GREEDY, "demo"), TALK)
    assert len(updates) > 1
    assert "".join(update.text for update in updates) == expected.outputs[0].text
    last = updates[-1]
    assert (last.num_prompt_tokens, last.num_tokens) == (
        len(expected.prompt_token_ids), len(expected.outputs[0].token_ids),
    )  # fmt: skip
    assert (last.finish_reason, last.reasoning) == (expected.outputs[0].finish_reason, "")


def test_answer_may_take_all_that_fits(llm: LLM) -> None:
    last = updates_of(LocalBackEnd(llm, ENDLESS, "demo"), TALK)[-1]
    assert last.num_prompt_tokens is not None
    assert last.num_tokens == 160 - last.num_prompt_tokens
    assert last.finish_reason == "length"


def test_conversation_that_does_not_fit_names_the_numbers(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="160 tokens"):
        LocalBackEnd(llm, ENDLESS, "demo").answer(TALK * 20, lambda update: None)


def test_model_without_a_template_continues_one_text(base_llm: LLM) -> None:
    back_end = LocalBackEnd(base_llm, GREEDY, "base")
    assert "base has no chat template: it continues what you write, up to 12 tokens at a time" in back_end.greeting
    [expected] = base_llm.generate("import os\ndef add(a, b):", GREEDY, use_tqdm=False)
    messages = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def add(a, b):"}]
    assert "".join(update.text for update in updates_of(back_end, messages)) == expected.outputs[0].text


def test_continuation_ends_somewhere(base_llm: LLM) -> None:
    last = updates_of(LocalBackEnd(base_llm, ENDLESS, "base"), TALK[:1])[-1]
    assert (last.num_tokens, last.finish_reason) == (CONTINUATION_MAX_TOKENS, "length")


def test_words_of_the_user_begin_a_line_and_answers_do_not() -> None:
    said = [("user", "def a("), ("assistant", "b):"), ("user", "  return"), ("assistant", " 1\n"), ("user", "x")]
    assert continued_text([{"role": role, "content": text} for role, text in said]) == "def a(b):\n  return 1\nx"


def test_model_without_a_tokenizer_is_refused(demo_model: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    with LLM(tmp_path / "model", **SMALL) as llm, pytest.raises(ChatError, match="has no tokenizer"):
        LocalBackEnd(llm, GREEDY, "bare")


def test_interrupt_ends_the_answer_between_steps_and_frees_its_blocks(llm: LLM) -> None:
    back_end = LocalBackEnd(llm, ENDLESS, "demo")
    updates: list[Update] = []

    def interrupt_at_the_third(update: Update) -> None:
        updates.append(update)
        if len(updates) == 3:
            signal.raise_signal(signal.SIGINT)

    with interruptible(), pytest.raises(KeyboardInterrupt):
        back_end.answer(TALK, interrupt_at_the_third)
    assert len(updates) == 3
    assert llm.kv_stats().used_blocks == 0
    assert updates_of(LocalBackEnd(llm, GREEDY, "demo"), TALK)


def test_second_interrupt_is_raised_where_it_comes() -> None:
    with interruptible():
        with postponed_interrupt() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert interrupted.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with postponed_interrupt() as interrupted:
            signal.raise_signal(signal.SIGINT)
        assert not interrupted.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
