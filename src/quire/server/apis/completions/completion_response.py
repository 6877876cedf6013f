"""Responses of /v1/completions."""

from collections.abc import Sequence
from functools import cached_property

from quire.core.outputs import CompletionOutput
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.server.api.token_logprobs import TokenNames
from quire.server.apis.completions.openai_logprobs import (
    CompletionLogprobs,
    LogprobPiece,
    completion_logprobs,
    prompt_logprobs,
)
from quire.server.apis.completions.openai_response import (
    UNUSED_OF_CHOICES,
    UNUSED_OF_CHUNK_CHOICES,
    Json,
    OpenAIRequest,
    OpenAIResponseBuilder,
)
from quire.text.tokenizer import Tokenizer

# Fields of a choice that are null unless they are set.
_NULL_FIELDS_OF_CHUNKS: Json = {"prompt_token_ids": None, "token_ids": None, **UNUSED_OF_CHUNK_CHOICES}
_NULL_FIELDS: Json = {"prompt_token_ids": None, "prompt_logprobs": None, "token_ids": None, **UNUSED_OF_CHOICES}


class CompletionResponseBuilder(OpenAIResponseBuilder):
    """Builder for completions. With `echo`, choices and logprobs begin with the prompt; construct it in a thread."""

    OBJECT = CHUNK_OBJECT = "text_completion"

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer | None, *, echo: bool) -> None:
        super().__init__(request)
        self._tokenizer = tokenizer
        self._echoes = [self._echo(prompt_index) for prompt_index in range(len(request.requests))] if echo else None
        has_logprobs = echo and request.checked.params.logprobs is not None
        # characters that tokenizing added to each prompt
        self._num_added = [self._num_added_chars(each.prompt) for each in request.requests] if has_logprobs else None
        self._null_fields = _NULL_FIELDS_OF_CHUNKS if request.stream else _NULL_FIELDS
        self._logprobs: dict[int, CompletionLogprobs] = {}  # choice -> its logprobs, once it has output
        self._begun: set[int] = set()            # choices with a first part

    @cached_property
    def _names(self) -> TokenNames:
        """Texts of the tokens of logprobs."""
        return TokenNames(self._tokenizer, as_ids=self.request.writes_token_ids)

    def _choice(self, prompt_index: int, output: CompletionOutput) -> Json:
        index = self._index(prompt_index, output)
        choice: Json = {
            "index": index, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason, **self._null_fields,
        }  # fmt: skip
        if self.request.returns_token_ids:
            choice["token_ids"] = output.token_ids
        is_first = index not in self._begun
        if output.packed_logprobs is not None:
            written = self._logprobs.get(index) or self._choice_logprobs(prompt_index, index)
            pieces = [written.piece(output.token_ids, output.packed_logprobs)]
            if is_first and self._echoes is not None:
                pieces = [self._prompt_part(prompt_index), *pieces]
            choice["logprobs"] = completion_logprobs(pieces)
        if is_first:
            self._begun.add(index)
            self._add_prompt(choice, prompt_index)
        return choice

    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Sequence[Json]:
        is_echo = self._echoes is not None and self._index(prompt_index, piece) not in self._begun
        return (self._choice(prompt_index, piece),) if is_echo or self._is_shown(piece) else ()

    def _has_text_chunks(self, index: int) -> bool:
        return index in self._begun

    def _add_prompt(self, choice: Json, prompt_index: int) -> None:
        """Add the prompt's fields to the first piece of a choice."""
        if self.request.returns_token_ids:
            choice["prompt_token_ids"] = self.request.requests[prompt_index].prompt.token_ids.tolist()
        if self.request.returns_prompt_logprobs:
            table = self._prompt_logprobs[prompt_index]
            choice["prompt_logprobs"] = None if table is None else prompt_logprobs(self._names, table)
        if self.request.checked.params.prompt_logprob_token_ids is not None:
            choice |= self._scores_of_prompt(prompt_index)
        if self._echoes is not None:
            choice["text"] = self._echoes[prompt_index] + choice["text"]

    def _echo(self, prompt_index: int) -> str:
        """Return the text of a prompt: as sent, or decoded from its tokens, special tokens included.

        Without a tokenizer it is empty, as all texts are.
        """
        prompt = self.request.requests[prompt_index].prompt
        if prompt.text is not None:
            return prompt.text
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)

    def _prompt_part(self, prompt_index: int) -> LogprobPiece:
        """Return the logprobs of a prompt, which precede those of each choice."""
        table = self._prompt_logprobs[prompt_index]
        assert table is not None, "logprobs with echo include the prompt's"
        prompt = self.request.requests[prompt_index].prompt
        start = 0 if prompt.text is None or self._num_added is None else -self._num_added[prompt_index]
        written = CompletionLogprobs(
            self._tokenizer, [], skip_special_tokens=False, start=start, names=self._names
        )
        return written.piece(prompt.token_ids, table)

    def _num_added_chars(self, prompt: TokenizedPrompt) -> int:
        """Return the characters of special tokens that tokenizing added to a text; its echo does not show them."""
        if prompt.text is None:
            return 0
        assert self._tokenizer is not None, "a text was tokenized"
        decoded = self._tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        return len(decoded) - len(prompt.text)

    def _choice_logprobs(self, prompt_index: int, index: int) -> CompletionLogprobs:
        start = 0 if self._echoes is None else len(self._echoes[prompt_index])
        token_ids = self.request.requests[prompt_index].prompt.token_ids
        skip = self.request.checked.params.skip_special_tokens
        written = self._logprobs[index] = CompletionLogprobs(
            self._tokenizer, token_ids, skip_special_tokens=skip, start=start, names=self._names
        )
        return written
