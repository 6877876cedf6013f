"""Answers of /v1/completions."""

from collections.abc import Sequence

from quire.core.outputs import CompletionOutput
from quire.engine.input_processor import TokenizedPrompt
from quire.server.openai.answer_format import AnswerFormat, Call, Json
from quire.server.openai.logprobs import CompletionLogprobs, CompletionLogprobsWriter
from quire.text.tokenizer import Tokenizer


class CompletionFormat(AnswerFormat):
    """With `echo`, a choice begins with its prompt, and so do its logprobs."""

    OBJECT = CHUNK_OBJECT = "text_completion"

    def __init__(self, call: Call, tokenizer: Tokenizer | None, *, echo: bool) -> None:
        super().__init__(call)
        self._tokenizer = tokenizer
        self._echoes = [self._echo(prompt_index) for prompt_index in range(len(call.requests))] if echo else None
        self._echoed_logprobs: dict[int, CompletionLogprobs] = {}
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        self._begun: set[int] = set()            # choices that have been written in part

    def _choice(self, prompt_index: int, output: CompletionOutput) -> Json:
        index = self._index(prompt_index, output)
        choice: Json = {
            "index": index, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        choice |= self._tokens(output)
        if output.logprobs is not None:
            writer = self._writers.get(index) or self._begin_logprobs(prompt_index, index)
            choice["logprobs"] = writer.write(output.token_ids, output.logprobs)
        if index not in self._begun:
            self._begun.add(index)
            self._add_prompt(choice, prompt_index)
        return choice

    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Sequence[Json]:
        is_echo = self._echoes is not None and self._index(prompt_index, piece) not in self._begun
        return (self._choice(prompt_index, piece),) if is_echo or self._is_worth_a_chunk(piece) else ()

    def _add_prompt(self, choice: Json, prompt_index: int) -> None:
        """Put what was asked of the prompt into the first piece of a choice."""
        if self.call.body.return_token_ids:
            choice["prompt_token_ids"] = self.call.requests[prompt_index].prompt.token_ids
        if self.call.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs[prompt_index]
        if self._echoes is None:
            return
        choice["text"] = self._echoes[prompt_index] + choice["text"]
        if choice["logprobs"] is not None:
            choice["logprobs"] = self._prompt_part(prompt_index) + choice["logprobs"]

    def _echo(self, prompt_index: int) -> str:
        """Return the text of a prompt: as it came, or what its tokens stand for."""
        prompt = self.call.requests[prompt_index].prompt
        if prompt.text is not None:
            return prompt.text
        assert self._tokenizer is not None, "without a tokenizer echo is refused"
        return self._tokenizer.decode(prompt.token_ids, self.call.params.skip_special_tokens)

    def _prompt_part(self, prompt_index: int) -> CompletionLogprobs:
        """Return the logprobs of a prompt, made once for all of its choices."""
        part = self._echoed_logprobs.get(prompt_index)
        if part is None:
            positions = self._prompt_logprobs[prompt_index]
            assert positions is not None, "logprobs with echo ask for the prompt's"
            prompt = self.call.requests[prompt_index].prompt
            part = self._echoed_logprobs[prompt_index] = self._echo_writer(prompt).write(prompt.token_ids, positions)
        return part

    def _echo_writer(self, prompt: TokenizedPrompt) -> CompletionLogprobsWriter:
        """Return a writer for a prompt, whose text has the special tokens that came in it, and none put before it."""
        if prompt.text is None:
            return self._writer([], start=0)
        assert self._tokenizer is not None, "without a tokenizer echo is refused"
        num_added = len(self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)) - len(prompt.text)
        return CompletionLogprobsWriter(self._tokenizer, [], skip_special_tokens=False, start=-num_added)

    def _begin_logprobs(self, prompt_index: int, index: int) -> CompletionLogprobsWriter:
        start = 0 if self._echoes is None else len(self._echoes[prompt_index])
        token_ids = self.call.requests[prompt_index].prompt.token_ids
        writer = self._writers[index] = self._writer(token_ids, start)
        return writer

    def _writer(self, prompt_token_ids: list[int], start: int) -> CompletionLogprobsWriter:
        skip = self.call.params.skip_special_tokens
        return CompletionLogprobsWriter(self._tokenizer, prompt_token_ids, skip_special_tokens=skip, start=start)
