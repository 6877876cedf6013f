"""Completions as JSON: echo, the numbers of choices, and what the first piece of a choice tells."""

from itertools import chain
from typing import Any

import pytest

from quire.core.logprob_table import LogprobTable
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.server.apis.completions.openai_response import CompletionResponseBuilder, OpenAIRequest
from quire.text.tokenizer import Tokenizer
from support.openai_calls import call_of, events_in
from support.text_tokenizers import write_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder("byte_level", tmp_path_factory.mktemp("byte_level")))


def piece(index: int, text: str, token_id: int, **end: Any) -> CompletionOutput:  # noqa: ANN401 (JSON)
    table = LogprobTable.of([([token_id], [-1.0], [1])])
    return CompletionOutput(index, text, [token_id], packed_logprobs=table, **end)


def chunks_of(
    api_request: OpenAIRequest, tokenizer: Tokenizer | None, *steps: tuple[int, RequestOutput], echo: bool = False
) -> list[dict[str, Any]]:
    """The choices of the chunks that outputs are written in, each with the number of its prompt."""
    written = CompletionResponseBuilder(api_request, tokenizer, echo=echo)
    chunks = [written.chunks(prompt_index, output) for prompt_index, output in steps]
    events = events_in(b"".join(chain.from_iterable(chunks)))
    return [choice for event in events for choice in event["choices"]]


def output(*pieces: CompletionOutput, **fields: Any) -> RequestOutput:  # noqa: ANN401 (JSON)
    return RequestOutput("x", None, [], list(pieces), finished=False, **fields)


def test_choices_of_a_prompt_follow_those_of_the_prompt_before() -> None:
    api_request = call_of(prompts=[[5], [6], [7]], n=2)
    steps = [(prompt, output(CompletionOutput(branch, "x", [1]))) for prompt in (2, 0, 1) for branch in (1, 0)]
    assert [choice["index"] for choice in chunks_of(api_request, None, *steps)] == [5, 4, 1, 0, 3, 2]


def test_echo_begins_each_choice_once() -> None:
    api_request = call_of(prompts=[[5], [6]], texts=["one", "two"], n=2)
    step = output(CompletionOutput(0, "", [1]), CompletionOutput(1, "b", [1]))
    later = output(CompletionOutput(0, "c", [1]))
    choices = chunks_of(api_request, None, (1, step), (1, later), (0, later), echo=True)
    assert [(choice["index"], choice["text"]) for choice in choices] == [(2, "two"), (3, "twob"), (2, "c"), (0, "onec")]


def test_echo_of_token_ids_is_their_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("naïve 日本")
    step = output(CompletionOutput(0, "!", [5]))
    (choice,) = chunks_of(call_of(prompts=[token_ids]), tokenizer, (0, step), echo=True)
    assert choice["text"] == "naïve 日本!"


def test_logprobs_of_an_echo_begin_with_the_prompt(tokenizer: Tokenizer) -> None:
    text = "naïve 日本"
    token_ids = tokenizer.encode(text)
    known = LogprobTable.of([([token], [-2.0], [1]) for token in token_ids[1:]])
    api_request = call_of(prompts=[token_ids], texts=[text], n=2, logprobs=0)
    steps = [(0, output(piece(0, "a", 68), packed_prompt_logprobs=known)), (0, output(piece(1, "b", 69)))]
    for choice in chunks_of(api_request, tokenizer, *steps, echo=True):
        logprobs = choice["logprobs"]
        assert choice["text"][: len(text)] == text
        assert logprobs["token_logprobs"] == [None, *[-2.0] * (len(token_ids) - 1), -1.0]
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"][-1] == len(text)
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(token_ids) + 1


def test_first_piece_of_each_choice_tells_of_the_prompt() -> None:
    api_request = call_of(prompts=[[5, 6]], n=2, return_token_ids=True, return_prompt_logprobs=True)
    known = LogprobTable.of([([6], [-2.0], [3])])
    step = output(CompletionOutput(0, "a", [1]), CompletionOutput(1, "b", [2]), packed_prompt_logprobs=known)
    choices = chunks_of(api_request, None, (0, step), (0, output(CompletionOutput(1, "c", [3]))))
    assert [choice["token_ids"] for choice in choices] == [[1], [2], [3]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[5, 6], [5, 6], None]
    told = [None, {"6": {"logprob": -2.0, "rank": 3, "decoded_token": None}}]
    assert [choice.get("prompt_logprobs") for choice in choices] == [told, told, None]


def test_text_that_is_not_complete_is_not_sent_unless_tokens_are_asked_for(tokenizer: Tokenizer) -> None:
    steps = [(0, output(piece(0, "", 5))), (0, output(piece(0, "é", 6)))]
    assert [choice["text"] for choice in chunks_of(call_of(), tokenizer, *steps)] == ["é"]
    choices = chunks_of(call_of(logprobs=0), tokenizer, *steps)
    assert [(choice["text"], len(choice["logprobs"]["tokens"])) for choice in choices] == [("", 1), ("é", 1)]


def test_end_is_told_with_its_reason_even_without_text() -> None:
    end = CompletionOutput(0, "", [5], finish_reason="stop", stop_reason="\n")
    (choice,) = chunks_of(call_of(), None, (0, output(end)))
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "\n")


def test_parts_of_text_alone_have_the_fields_of_the_first() -> None:
    texts = ["a", 'b"\n\u2028', "some text"]
    steps = [(prompt, output(CompletionOutput(0, text, [1]))) for text in texts for prompt in (0, 1)]
    choices = chunks_of(call_of(prompts=[[5], [6]]), None, *steps)
    assert choices == [{**choices[0], "index": index, "text": text} for text in texts for index in (0, 1)]
