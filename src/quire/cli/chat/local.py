"""Back end of a chat: a model in this process."""

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, cast

from quire.cli.chat.chat_history import ChatError, Update
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.text.conversation import Message

if TYPE_CHECKING:
    from quire.llm import LLM

CONTINUATION_MAX_TOKENS = 128  # a model that was never trained to end its turn would write until nothing fits


class LocalBackEnd:
    """An `LLM`. Without a chat template the model continues one text that the user and it write in turn."""

    def __init__(self, llm: "LLM", params: SamplingParams, name: str | None) -> None:
        if llm.tokenizer is None:
            raise ChatError(f"{name} has no tokenizer, which a chat needs; LLM.generate takes token ids")
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._name = name
        self._is_chat_model = self._tokenizer.chat_template is not None
        self._params = params
        if not self._is_chat_model and params.max_tokens is None:
            self._params = replace(params, max_tokens=max(CONTINUATION_MAX_TOKENS, params.min_tokens))

    @property
    def greeting(self) -> str:
        """The kind of model, for the user."""
        if self._name is None:
            return (
                "The bundled demo model is a toy that imitates Python's standard library. It knows two kinds of "
                'question: "Write a function parse_header." and "What does read_file do?"'
            )
        if self._is_chat_model:
            return f"Chatting with {self._name}."
        return (
            f"{self._name} has no chat template: it continues what you write, up to {self._params.max_tokens} tokens "
            "at a time (--max-tokens), instead of answering."
        )

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        """Run the model to the answer's end. Ctrl-C stops it at the end of a step, a second one at once."""
        outputs = self._llm.stream(self._prompt(messages), self._params)
        num_written = 0
        with postponed_interrupt() as interrupted, closing(cast(Generator[RequestOutput, None, None], outputs)):
            for output in outputs:
                [completion] = output.outputs
                on_update(
                    Update(
                        completion.text[num_written:],
                        num_prompt_tokens=len(output.prompt_token_ids),
                        num_tokens=len(completion.token_ids),
                        finish_reason=completion.finish_reason,
                    )
                )
                num_written = len(completion.text)
                if interrupted.is_set():
                    raise KeyboardInterrupt

    def _prompt(self, messages: Sequence[Message]) -> str | list[int]:
        if not self._is_chat_model:
            return continued_text(messages)
        return self._tokenizer.encode(self._tokenizer.apply_chat_template(messages), add_special_tokens=False)


def continued_text(messages: Sequence[Message]) -> str:
    """Return one text: a user's words begin a new line, an answer continues where they end."""
    text = ""
    for message in messages:
        if message["role"] == "user" and text and not text.endswith("\n"):
            text += "\n"
        text += message["content"]
    return text


@contextmanager
def postponed_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set an event, because amid a step it would leave a request half updated."""
    before = signal.getsignal(signal.SIGINT)
    interrupted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
