"""Commands and questions, with the demo model behind them."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cli.chat.chat_back_ends import LocalBackEnd
from quire.cli.chat.chat_history import ChatBackEnd, ChatError, ChatHistory, Exchange, Update
from quire.cli.chat.session import HELP, ChatSession, Screen, Tone
from quire.text.conversation import Message
from support.interrupts import interruptible

GREEDY = SamplingParams(temperature=0, max_tokens=8)
QUESTION = "Write a function parse_header."


class ScriptedPerson(Screen):
    """Types prepared lines and keeps what is shown. An exception among the lines is raised where it stands."""

    is_interactive = True

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)
        self.answers = self.asides = ""
        self.shown: list[tuple[Tone, str]] = []

    def write(self, text: str) -> None:
        self.answers += text

    def write_aside(self, text: str) -> None:
        self.asides += text

    def show(self, text: str, tone: Tone = "plain") -> None:
        self.shown.append((tone, text))

    def of_tone(self, tone: Tone) -> list[str]:
        return [text for shown_tone, text in self.shown if shown_tone == tone]

    def _read_line(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


class ScriptedPipe(ScriptedPerson):
    """The same without anybody to look."""

    is_interactive = False


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, num_kv_blocks=32, max_num_seqs=2, max_model_len=128) as llm:
        yield llm


@pytest.fixture
def back_end(llm: LLM) -> ChatBackEnd:
    return LocalBackEnd(llm, GREEDY, None)


def talk(back_end: ChatBackEnd, screen: ScriptedPerson, system: str | None = None) -> ChatHistory:
    conversation = ChatHistory(system)
    ChatSession(back_end, screen, conversation).run()
    return conversation


def test_each_question_sees_what_was_said_before(back_end: ChatBackEnd, llm: LLM) -> None:
    screen = ScriptedPerson(QUESTION, "", "   ", "And parse_body?")
    conversation = talk(back_end, screen, "Be brief.")
    assert [exchange.question for exchange in conversation.exchanges] == [QUESTION, "And parse_body?"]
    [expected] = llm.chat(conversation.messages()[:-1], GREEDY, use_tqdm=False)
    assert conversation.exchanges[1].answer == expected.outputs[0].text
    assert screen.answers == "".join(exchange.answer + "\n" for exchange in conversation.exchanges)


def test_demo_model_introduces_itself_as_a_toy(back_end: ChatBackEnd) -> None:
    screen = ScriptedPerson()
    talk(back_end, screen)
    assert "demo model is a toy" in screen.of_tone("faint")[0]


def test_message_may_have_several_lines_and_begin_with_a_slash(back_end: ChatBackEnd) -> None:
    conversation = talk(back_end, ScriptedPerson("//tmp \\", "is", "one\\"))
    assert [exchange.question for exchange in conversation.exchanges] == ["/tmp \nis", "one"]


def test_system_message_is_set_and_removed(back_end: ChatBackEnd) -> None:
    conversation = talk(back_end, ScriptedPerson("/system  Be kind. ", QUESTION))
    assert conversation.messages()[0] == {"role": "system", "content": "Be kind."}
    assert talk(back_end, ScriptedPerson("/system"), "Be kind.").system is None


def test_reset_forgets_what_was_said(back_end: ChatBackEnd) -> None:
    conversation = talk(back_end, ScriptedPerson(QUESTION, "/reset", QUESTION), "Be brief.")
    assert len(conversation.exchanges) == 1
    assert conversation.system == "Be brief."


def test_retry_replaces_the_last_answer(back_end: ChatBackEnd) -> None:
    screen = ScriptedPerson(QUESTION, "/retry")
    [exchange] = talk(back_end, screen).exchanges
    assert screen.answers == 2 * (exchange.answer + "\n")  # greedy: the same again


def test_save_writes_every_message(back_end: ChatBackEnd, tmp_path: Path) -> None:
    path = tmp_path / "with space.jsonl"
    conversation = talk(back_end, ScriptedPerson(QUESTION, f"/save {path}"), "Be brief.")
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == conversation.messages()


def test_stats_are_of_the_last_answer(back_end: ChatBackEnd) -> None:
    screen = ScriptedPerson(QUESTION, "/stats")
    talk(back_end, screen)
    [stats] = screen.of_tone("plain")
    assert stats.startswith("8 tokens in ")
    assert stats.endswith("ended by length")


def test_help_and_exit(back_end: ChatBackEnd) -> None:
    screen = ScriptedPerson("/help", "/exit", QUESTION)
    assert talk(back_end, screen).exchanges == []
    assert screen.of_tone("plain") == [HELP]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/nonsense", "there is no command /nonsense; /help lists them"),
        ("/retry", "/retry needs a question"),
        ("/stats", "/stats needs an answer"),
        ("/save", "/save needs the name of a file"),
        ("/save /no/such/folder/x", "No such file or directory"),
    ],
)
def test_command_that_cannot_work_is_told_and_a_pipe_ends(back_end: ChatBackEnd, line: str, complaint: str) -> None:
    screen = ScriptedPerson(line, QUESTION)
    assert len(talk(back_end, screen).exchanges) == 1
    assert complaint in screen.of_tone("error")[0]
    with pytest.raises((ChatError, OSError), match=complaint):
        talk(back_end, ScriptedPipe(line, QUESTION))


def test_conversation_that_no_longer_fits_loses_nothing(back_end: ChatBackEnd) -> None:
    long = "Write a function " * 40
    screen = ScriptedPerson(QUESTION, long, "/retry", QUESTION, long)
    conversation = talk(back_end, screen)
    complaints = screen.of_tone("error")
    assert len(complaints) == 3
    assert "128 tokens (max_model_len)" in complaints[0]
    assert "/reset makes room, and then /retry asks this question again" in complaints[0]
    assert [exchange.question for exchange in conversation.exchanges] == [QUESTION, QUESTION]
    assert conversation.messages()[-1] == {"role": "user", "content": long}


def test_question_that_did_not_fit_is_asked_again_after_a_reset(llm: LLM) -> None:
    back_end = LocalBackEnd(llm, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), None)
    screen = ScriptedPerson(QUESTION, "Again?", "/reset", "/retry")
    [exchange] = talk(back_end, screen).exchanges
    assert len(screen.of_tone("error")) == 1
    assert exchange.question == "Again?"
    assert exchange.answer
    assert any(text.startswith("(cut off") for text in screen.of_tone("faint"))


class Interrupted:
    """The demo model, interrupted by Ctrl-C after some tokens."""

    def __init__(self, back_end: ChatBackEnd, after: int) -> None:
        self.greeting = ""
        self._back_end = back_end
        self._after = after

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        if not self._after:
            raise KeyboardInterrupt
        left = self._after

        def pass_on(update: Update) -> None:
            nonlocal left
            left -= 1
            on_update(update)
            if not left:
                signal.raise_signal(signal.SIGINT)

        with interruptible():
            self._back_end.answer(messages, pass_on)


def test_answer_that_is_stopped_stays(back_end: ChatBackEnd) -> None:
    [whole] = talk(back_end, ScriptedPerson(QUESTION)).exchanges
    screen = ScriptedPerson(QUESTION, "/stats")
    [exchange] = talk(Interrupted(back_end, after=3), screen).exchanges
    assert exchange.answer
    assert whole.answer.startswith(exchange.answer)
    assert whole.answer != exchange.answer
    assert "(stopped)" in screen.of_tone("faint")
    assert screen.of_tone("plain")[0].startswith("3 tokens")


def test_answer_stopped_before_it_began_can_be_asked_for_again(back_end: ChatBackEnd) -> None:
    conversation = talk(Interrupted(back_end, after=0), ScriptedPerson(QUESTION))
    assert (conversation.exchanges, conversation.unanswered) == ([], QUESTION)


def test_interrupt_ends_a_pipe(back_end: ChatBackEnd) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk(Interrupted(back_end, after=3), ScriptedPipe(QUESTION))


def test_two_interrupts_at_the_prompt_leave_and_one_does_not(back_end: ChatBackEnd) -> None:
    screen = ScriptedPerson(KeyboardInterrupt, "", KeyboardInterrupt, KeyboardInterrupt, QUESTION)
    assert talk(back_end, screen).exchanges == []
    assert sum("Ctrl-C again" in text for text in screen.of_tone("faint")) == 2


class Failing:
    """Says something and fails, as a server may."""

    greeting = ""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        for text in self._texts:
            on_update(Update(text))
        raise ChatError("the server is gone")


class Reasoning:
    """Reasons, and answers."""

    greeting = ""

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        for update in (Update(reasoning="So "), Update(reasoning="it is."), Update("Yes"), Update(".")):
            on_update(update)


def test_reasoning_is_shown_and_not_kept() -> None:
    screen = ScriptedPerson("a")
    assert talk(Reasoning(), screen).exchanges == [Exchange("a", "Yes.")]
    assert screen.asides == "So it is.\n"
    assert screen.answers == "Yes.\n"


def test_failure_keeps_the_text_that_came_and_the_question_if_none_did() -> None:
    screen = ScriptedPerson("a", "/retry")
    assert talk(Failing("half"), screen).exchanges == [Exchange("a", "half")]
    assert screen.of_tone("error") == ["the server is gone"] * 2
    assert talk(Failing(), ScriptedPerson("a", "/retry")).unanswered == "a"


def test_retry_that_fails_leaves_the_answer_that_there_was(back_end: ChatBackEnd) -> None:
    conversation = ChatHistory()
    conversation.keep(Exchange("q", "a"))
    ChatSession(Failing(), ScriptedPerson("/retry"), conversation).run()
    assert (conversation.exchanges, conversation.unanswered) == ([Exchange("q", "a")], None)
