"""Prompts and parameters to requests: each is checked once, errors name the field, and nothing is queued."""

import gc
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from quire.core.errors import ContextLengthError, InvalidRequestError
from quire.core.pooling import BeamTask, Scope
from quire.core.sampling_params import BeamSearchParams, SamplingParams, arrival_seed, as_sampling_params
from quire.core.token_ids import pack_tokens
from quire.engine.messages import Ready, SamplingDefaults
from quire.engine.options import EngineOptions
from quire.engine.requests.input_processor import InputProcessor, PreparedRequest, TokenizedPrompt
from quire.scheduling.limits import AdmissionLimits
from quire.text.tokenizer import Tokenizer
from support.small_tokenizers import CHAT_TEMPLATE, byte_fallback, byte_level, save

VOCAB_SIZE, ENGINE_SEED, EOS_ID = 400, 11, 1
LIMITS = AdmissionLimits(num_blocks=10, block_size=16, max_num_seqs=4, max_model_len=100)
TEXT = "the stop"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return Tokenizer.from_folder(save(byte_fallback(), folder, chat_template=CHAT_TEMPLATE))


def make_inputs(
    tokenizer: Tokenizer | None, eos_token_ids: frozenset[int] = frozenset({EOS_ID}), vocab_size: int = VOCAB_SIZE,
    max_logprobs: int = 5,
) -> InputProcessor:  # fmt: skip
    ready = Ready(LIMITS, 64, vocab_size, eos_token_ids, "float32", "cpu", 0, 0, 0)
    return InputProcessor(tokenizer, ready, EngineOptions(seed=ENGINE_SEED, max_logprobs=max_logprobs))


def packed(token_ids: list[int], salt: str | None = None) -> TokenizedPrompt:
    return TokenizedPrompt(None, pack_tokens(token_ids), salt)


def prepare(inputs: InputProcessor, prompt: TokenizedPrompt, **params: Any) -> PreparedRequest:  # noqa: ANN401
    """Return a request with these parameters, which are checked before."""
    return inputs.prepare(0, prompt, inputs.check_params(SamplingParams(**params)))


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return make_inputs(tokenizer)


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(VOCAB_SIZE, {7, EOS_ID}), (EOS_ID, {7})], ids=["known", "not of the model"]
)
def test_tokenizers_end_of_sequence_token_ends_an_answer_too(
    tokenizer: Tokenizer, vocab_size: int, expected: set[int]
) -> None:
    assert tokenizer.eos_token_id == EOS_ID
    inputs = make_inputs(tokenizer, frozenset({7}), vocab_size)
    tokens = packed([0])
    assert prepare(inputs, tokens).request.eos_token_ids == expected
    assert prepare(inputs, tokens, ignore_eos=True).request.eos_token_ids == frozenset()
    assert prepare(make_inputs(None, frozenset({7})), tokens).request.eos_token_ids == {7}


def test_all_ends_of_sequence_but_the_tokenizers_are_stop_tokens(tokenizer: Tokenizer) -> None:
    inputs, tokens = make_inputs(tokenizer, frozenset({7, EOS_ID})), packed([0])
    assert prepare(inputs, tokens).request.stop_token_ids == {7}
    assert prepare(inputs, tokens, stop_token_ids=[EOS_ID, 9]).request.stop_token_ids == {7, 9}
    assert prepare(inputs, tokens, stop_token_ids=[EOS_ID], ignore_eos=True).request.stop_token_ids == {EOS_ID}
    assert prepare(make_inputs(None, frozenset({7})), tokens).request.stop_token_ids == {7}


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_text_becomes_tokens_as_the_model_was_trained_to_see_them(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids[0] == tokenizer.encode("<s>", add_special_tokens=False)[-1]
    assert inputs.tokenize(TEXT) == inputs.tokenize({"prompt": TEXT}) == TokenizedPrompt(TEXT, pack_tokens(ids))


@pytest.mark.parametrize("prompt", [[5, 0, 399], (5, 0, 399), {"prompt_token_ids": [5, 0, 399]}], ids=str)
def test_token_ids_are_taken_as_they_are(inputs: InputProcessor, prompt: Any) -> None:  # noqa: ANN401
    assert inputs.tokenize(prompt) == packed([5, 0, 399])


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_hopelessly_long_text_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Backend]
) -> None:
    tokenizer = Tokenizer.from_folder(save(kind(), tmp_path))
    inputs, encoded = make_inputs(tokenizer), list[int]()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **rest: encoded.append(len(text)) or encode(text, **rest))
    for tokenize in (inputs.tokenize, inputs.tokenize_rendered):
        with pytest.raises(ContextLengthError, match=r"too long: it has \d+ tokens or more.* is 100 tokens"):
            tokenize("stop " * 100_000)
    assert encoded == []
    assert len(inputs.tokenize("stop " * 50).token_ids) > 50
    assert encoded == [250]


def test_prompt_in_a_dict_may_have_a_salt(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    text = inputs.tokenize({"prompt": TEXT, "cache_salt": "a"})
    assert text == TokenizedPrompt(TEXT, pack_tokens(tokenizer.encode(TEXT)), "a")
    assert inputs.tokenize({"prompt_token_ids": [5], "cache_salt": "b"}) == packed([5], "b")
    assert prepare(inputs, text).request.scope == Scope("a")
    assert prepare(inputs, inputs.tokenize(TEXT)).request.scope == Scope()


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5, "\ud800"], ids=["empty", "too long", "no text", "no Unicode"])
def test_salt_that_is_none_is_refused(inputs: InputProcessor, salt: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequestError, match="cache_salt must be a string of 1 to 1024 characters") as refused:
        inputs.tokenize({"prompt": TEXT, "cache_salt": salt})
    assert refused.value.param == "cache_salt"


@pytest.mark.parametrize("prompt", [TEXT, [5] * 20_000], ids=["text", "tokens"])
def test_prompt_is_packed(inputs: InputProcessor, prompt: Any) -> None:  # noqa: ANN401
    """Garbage collections find none of its tokens."""
    inputs.limits = replace(LIMITS, max_model_len=1 << 20)
    tokens = inputs.tokenize(prompt).token_ids
    assert gc.get_referents(tokens) == [array]
    assert isinstance(prompt, str) or tokens.tolist() == prompt


def test_prompt_is_a_copy_that_its_giver_cannot_change(inputs: InputProcessor) -> None:
    given = [1, 2, 3]
    prompt = inputs.tokenize(given)
    given.append(400)
    assert prompt == packed([1, 2, 3])


NO_PROMPTS: dict[str, tuple[Any, str]] = {
    "nothing": ([], "prompt is empty"),
    "id beyond the vocabulary": ([5, 400], "from 0 to 399, got 400"),
    "negative id": ([-1], "from 0 to 399, got -1"),
    "boolean": ([True], "from 0 to 399, got True"),
    "float": ([1.0], "from 0 to 399, got 1.0"),
    "texts": (["5"], "from 0 to 399, got '5'"),
    "lists": ([[5]], "from 0 to 399, got a list of 1"),
    "very long id": ([10**5000], "from 0 to 399, got an integer of 16610 bits"),
    "very long text": (["x" * 10**6], r"from 0 to 399, got 'x{79}\.\.\."),
    "null": (None, "must be text, a list of token ids or a dict of one of them, got NoneType"),
    "bytes": (b"text", "must be text, a list of token ids or a dict of one of them, got bytes"),
    "dict of a number": ({"prompt": 5}, "a prompt given as a dict .* got keys 'prompt'"),
    "dict of both": ({"prompt": "x", "prompt_token_ids": [1]}, "got keys 'prompt, prompt_token_ids'"),
    "dict of something else": ({"text": "x"}, "got keys 'text'"),
    "embeddings": ({"prompt_embeds": [[0.5]]}, "got keys 'prompt_embeds'"),
    "embeddings beside a text": ({"prompt": "x", "prompt_embeds": [[0.5]]}, "got keys 'prompt, prompt_embeds'"),
    "text for ids": ({"prompt_token_ids": "abc"}, "must be text, a list of token ids"),
    "half a pair": ("half \ud83d a pair", "valid Unicode"),
}


@pytest.mark.parametrize(("prompt", "told"), NO_PROMPTS.values(), ids=NO_PROMPTS)
def test_what_is_no_prompt_is_refused(inputs: InputProcessor, prompt: Any, told: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequestError, match=told) as error:
        inputs.tokenize(prompt)
    assert error.value.param == "prompt"
    assert len(str(error.value)) < 300


def test_text_without_a_token_is_refused(tmp_path: Path) -> None:
    plain = byte_fallback()
    plain.post_processor = None
    inputs = make_inputs(Tokenizer.from_folder(save(plain, tmp_path)))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        inputs.tokenize("")


def test_chat_is_what_the_template_wrote_with_no_token_added(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    conversation = [{"role": "user", "content": "stop"}]
    prompt = inputs.tokenize_chat(conversation, add_generation_prompt=True, continue_final_message=False)
    assert prompt.text == "<s>user: stop\nassistant:"
    assert prompt == inputs.tokenize_rendered(prompt.text)
    assert prompt.token_ids.count(tokenizer.encode("<s>", add_special_tokens=False)[-1]) == 1


# --- a model without a tokenizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "param"),
    [({"stop": "x"}, "stop"), ({"bad_words": ["x"]}, "bad_words")],
    ids=str,
)
def test_without_a_tokenizer_what_needs_text_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer") as error:
        make_inputs(None).check_params(SamplingParams(**given))
    assert error.value.param == param


def test_without_a_tokenizer_only_token_ids_are_prompts() -> None:
    inputs = make_inputs(None)
    assert inputs.tokenize([1, 2]) == packed([1, 2])
    with pytest.raises(InvalidRequestError, match="give token ids") as text:
        inputs.tokenize("x")
    with pytest.raises(InvalidRequestError, match="chat needs one") as chat:
        inputs.tokenize_chat([], add_generation_prompt=True, continue_final_message=False)
    assert (text.value.param, chat.value.param) == ("prompt", "messages")


# --- requests ---------------------------------------------------------------------------------------------------------


def test_request_holds_everything_resolved(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    params = SamplingParams(seed=3, max_tokens=7, stop_token_ids=[9, 9, 8], bad_words=["stop", " the"])
    request = inputs.prepare(5, inputs.tokenize(TEXT), inputs.check_params(params)).request
    assert (request.request_id, request.seed, request.max_tokens) == (5, 3, 7)
    assert prepare(inputs, inputs.tokenize(TEXT), seed=-3).request.seed == 2**64 - 3
    assert request.prompt_token_ids.tolist() == tokenizer.encode(TEXT)
    assert request.params == params
    assert request.eos_token_ids == {EOS_ID}
    assert request.stop_token_ids == {8, 9}
    spelled = [tuple(tokenizer.encode(word, add_special_tokens=False)) for word in ("stop", " stop", " the")]
    assert set(spelled) == set(request.bad_words_token_ids)


def test_bad_words_are_encoded_once_for_all_prompts(
    inputs: InputProcessor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = list[str](), tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **rest: encoded.append(text) or encode(text, **rest))
    checked = inputs.check_params(SamplingParams(bad_words=["stop"]))
    assert encoded == [], "while the event loop waits"
    requests = [inputs.prepare(number, packed([1]), checked).request for number in range(3)]
    assert encoded == ["stop", " stop"]
    assert len({request.bad_words_token_ids for request in requests}) == 1


def test_beam_search_has_its_parameters_and_as_many_sequences_as_beams(inputs: InputProcessor) -> None:
    beam = BeamSearchParams(3, None)
    prompt, params = packed([1, 2]), as_sampling_params(beam)
    request = inputs.prepare(0, prompt, inputs.check_params(params, beam)).request
    assert request.task == BeamTask(beam)
    assert request.params.n == 3
    assert request.eos_token_ids == {EOS_ID}
    assert request.max_tokens == inputs.prepare(1, prompt, inputs.check_params(params)).request.max_tokens


def test_end_of_sequence_can_be_ignored(inputs: InputProcessor) -> None:
    request = prepare(inputs, packed([1]), ignore_eos=True).request
    assert request.eos_token_ids == frozenset()


def test_request_without_a_seed_gets_one_from_the_engines_and_its_number(inputs: InputProcessor) -> None:
    prompt = packed([1])
    checked = inputs.check_params(SamplingParams())
    seeds = [inputs.prepare(number, prompt, checked).request.seed for number in range(3)]
    assert seeds == [arrival_seed(ENGINE_SEED, number) for number in range(3)]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(("prompt_len", "n", "most"), [(1, 1, 99), (40, 4, 24), (99, 1, 1)])
def test_without_max_tokens_a_request_gets_the_most_that_fits(
    inputs: InputProcessor, prompt_len: int, n: int, most: int
) -> None:
    request = prepare(inputs, packed([1] * prompt_len), n=n, max_tokens=None).request
    assert request.max_tokens == most


@pytest.mark.parametrize(
    ("prompt_len", "given", "told"),
    [
        (100, {"max_tokens": None}, "max_model_len"),
        (90, {"max_tokens": 11}, "max_model_len"),
        (90, {"max_tokens": None, "min_tokens": 11}, "max_model_len"),
        (40, {"n": 4, "max_tokens": 25}, "num_kv_blocks"),
    ],
)
def test_what_can_never_run_is_refused(
    inputs: InputProcessor, prompt_len: int, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ContextLengthError, match=told):
        prepare(inputs, packed([1] * prompt_len), **given)


@pytest.mark.parametrize(
    ("given", "told", "param"),
    [
        ({"logprobs": 6}, r"logprobs must be at most 5 \(max_logprobs\), got 6", "logprobs"),
        ({"prompt_logprobs": 6}, r"prompt_logprobs must be at most 5 \(max_logprobs\), got 6", "prompt_logprobs"),
        ({"stop_token_ids": [400]}, "vocabulary size of 400", "stop_token_ids"),
        ({"logit_bias": {400: 1}}, "vocabulary size of 400", "logit_bias"),
        ({"allowed_token_ids": [400]}, "vocabulary size of 400", "allowed_token_ids"),
        ({"n": 5}, "at most 4 sequences", "n"),
    ],
    ids=str,
)
def test_parameter_that_this_model_cannot_serve_is_refused_by_name(
    inputs: InputProcessor, given: dict[str, Any], told: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError, match=told) as error:
        prepare(inputs, packed([1]), **given)
    assert error.value.param == param


def test_changes_after_the_check_have_no_effect_on_a_request(inputs: InputProcessor) -> None:
    params = SamplingParams(logit_bias={5: 1.0})
    checked = inputs.check_params(params)
    params.max_tokens, params.logit_bias[6] = 3, 1.0  # type: ignore[index]
    assert (checked.params.max_tokens, checked.params.logit_bias) == (16, {5: 1.0})
    assert inputs.check_params(params).params == params
    params.min_p = 2.0
    with pytest.raises(InvalidRequestError, match="min_p must be a number from 0 to 1, got 2") as error:
        inputs.check_params(params)
    assert error.value.param == "min_p"


def test_whole_vocabulary_of_logprobs(tokenizer: Tokenizer) -> None:
    inputs = make_inputs(tokenizer, max_logprobs=-1)
    assert inputs.check_params(SamplingParams(logprobs=-1, prompt_logprobs=VOCAB_SIZE)).params.logprobs == VOCAB_SIZE
    for asked in ({"logprobs": VOCAB_SIZE + 1}, {"prompt_logprobs": VOCAB_SIZE + 1}):
        with pytest.raises(InvalidRequestError, match=f"at most {VOCAB_SIZE}"):
            inputs.check_params(SamplingParams(**asked))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"at most 5 \(max_logprobs\), got 400"):
        make_inputs(tokenizer).check_params(SamplingParams(logprobs=-1))


def test_parameters_of_another_type_are_refused(inputs: InputProcessor) -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, got dict"):
        inputs.check_params({"n": 1})  # type: ignore[arg-type]


def test_fcfs_refuses_priorities() -> None:
    ready = Ready(LIMITS, 64, VOCAB_SIZE, frozenset({EOS_ID}), "float32", "cpu", 0, 0, 0)
    inputs = InputProcessor(None, ready, EngineOptions(scheduling_policy="fcfs"))
    assert prepare(inputs, inputs.tokenize([1, 2])).request.priority == 0
    with pytest.raises(InvalidRequestError, match=r"priority must be 0, .* scheduling_policy fcfs, got -3") as told:
        inputs.check_params(SamplingParams(), priority=-3)
    assert told.value.param == "priority"


def test_answers_of_an_llm_end_at_max_model_len_where_a_server_refuses(tokenizer: Tokenizer) -> None:
    ready = Ready(LIMITS, 64, VOCAB_SIZE, frozenset({EOS_ID}), "float32", "cpu", 0, 0, 0)
    inputs = InputProcessor(tokenizer, ready, EngineOptions(), cuts_answers=True)
    assert prepare(inputs, packed([1] * 90), max_tokens=30).request.max_tokens == 10
    assert prepare(inputs, packed([1] * 60), max_tokens=30).request.max_tokens == 30
    for length, given in ((100, {"max_tokens": 1}), (90, {"max_tokens": 30, "min_tokens": 11})):
        with pytest.raises(ContextLengthError, match="max_model_len"):
            prepare(inputs, packed([1] * length), **given)


def test_defaults_bound_an_answer_without_max_tokens(tokenizer: Tokenizer) -> None:
    def most(sampling: SamplingDefaults, prompt_len: int = 10, **given: int | None) -> int:
        ready = Ready(LIMITS, 64, VOCAB_SIZE, frozenset(), "float32", "cpu", 0, 0, 0, sampling=sampling)
        inputs = InputProcessor(tokenizer, ready, EngineOptions())
        return prepare(inputs, packed([1] * prompt_len), **{"max_tokens": None, **given}).request.max_tokens

    named = SamplingDefaults({"max_tokens": 30})
    assert [most(named), most(named, 95), most(named, max_tokens=40)] == [30, 5, 40]
    assert most(SamplingDefaults({"max_tokens": 30}, 20)) == 20
    assert most(named, min_tokens=35) == 35
