"""Input processing: a prompt and its parameters are checked against the model and become a `Request`.

Each check against the model is defined here and nowhere else, and made once; values alone are checked by the
parameters' own classes. `check_params` needs no prompt, so that a request is refused before its text is tokenized, and
`prepare` accepts only the `CheckedParams` that it returns.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

from quire.core.checks import MAX_INT, check_int, check_text, shown
from quire.core.errors import InvalidRequestError
from quire.core.images import PromptImage
from quire.core.logprob_table import check_num_rows, width_of
from quire.core.lora import Adapter
from quire.core.outputs import RequestMetrics
from quire.core.owner_labels import OwnerLabels
from quire.core.pooling import GENERATE, BeamTask, PinTask, Scope, Task
from quire.core.sampling_params import NUM_SEEDS, BeamSearchParams, SamplingParams, arrival_seed
from quire.core.sequence import Request
from quire.core.token_ids import PackedTokens, pack_tokens
from quire.engine.messages import Ready
from quire.engine.options import EngineOptions
from quire.engine.requests.image_prompts import ImagePrompts, NumberedImage
from quire.engine.requests.reasoning_gate import ReasoningMarkers
from quire.text.conversation import Message
from quire.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text. With a salt, it shares cached blocks only with prompts of the same salt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]
    images: NotRequired[tuple[PromptImage, ...]]     # a session's: `Session.prompt` returns them


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


S = TypeVar("S", list[int], PackedTokens)


class Truncation(NamedTuple):
    """Number of tokens of a prompt that are kept, its last ones or its first ones."""

    num_tokens: int
    keeps_last: bool = True


class TokenizedPrompt(NamedTuple):
    """A prompt in token ids, its text if it was given as text, its salt, and the API key of its request.

    The tokens are packed: a full garbage collection walks lists, 0.2 s for 255 prompts of 100,000.
    """

    text: str | None
    token_ids: PackedTokens
    cache_salt: str | None = None
    key_number: int = 0         # from 1; 0: none
    adapter: Adapter | None = None
    second_text: int = 0        # where the second text of a pair begins; 0: nowhere
    images: tuple[PromptImage, ...] = ()

    def salted(self, cache_salt: str | None, key_number: int = 0) -> "TokenizedPrompt":
        """Return the prompt with a salt, which has been checked, and the number of its key."""
        return self._replace(cache_salt=cache_salt, key_number=key_number)

    def adapted(self, adapter: Adapter | None) -> "TokenizedPrompt":
        """Return the prompt for an adapter of the model."""
        return self if adapter is None else self._replace(adapter=adapter)


@dataclass(frozen=True, eq=False)
class CheckedParams:
    """Parameters of requests, checked against the model. Only `InputProcessor.check_params` makes them."""

    params: SamplingParams
    beam: BeamSearchParams | None
    priority: int
    tokenizer: Tokenizer | None = field(repr=False)

    @cached_property
    def bad_words_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of each bad word, as spelled at the beginning of a text and after a space.

        Encoded when first read, which takes longer than an event loop should wait.
        """
        if not self.params.bad_words:
            return ()
        assert self.tokenizer is not None, "check_params refuses bad words without a tokenizer"
        spellings = [spelling for word in self.params.bad_words for spelling in (word, " " + word.lstrip())]
        encoded = (tuple(self.tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        return tuple(dict.fromkeys(ids for ids in encoded if ids))


class PreparedRequest(NamedTuple):
    """A request that was checked and numbered, and its prompt. Not queued yet."""

    request: Request
    prompt: TokenizedPrompt
    kept_token_ids: frozenset[int] = frozenset()  # special tokens that skip_special_tokens leaves in the text
    reasoning: ReasoningMarkers | None = None     # stop strings are looked for behind it
    metrics: RequestMetrics | None = None         # begun while another engine computed the prompt


_NO_IDS = frozenset[int]()     # a new one would take 216 bytes of each request
_IDS_AT_ONCE = 8192    # checked and packed, which keeps the interpreter lock for half a millisecond
ANY_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, seed=0, detokenize=False)  # for calls without an answer

MAX_PRIORITY = 100     # either sign; in levels of ageing
MAX_SALT_CHARS = 1024  # the cache stores a salt as long as a block computed under it


def check_cache_salt(cache_salt: object, max_chars: int = MAX_SALT_CHARS) -> str | None:
    """Return a salt, or None for none. InvalidRequestError for anything else."""
    return None if cache_salt is None else check_text("cache_salt", cache_salt, max_chars)


def _checked_images(images: object, truncation: Truncation | None) -> tuple[PromptImage, ...]:
    """Return the images of a session's prompt. InvalidRequestError for anything else, and for a truncated prompt."""
    if not isinstance(images, tuple) or not all(isinstance(each, PromptImage) for each in images):
        raise InvalidRequestError("images of a prompt must be those that session.prompt returns", param="prompt")
    _check_whole(images, truncation)
    return images


def _check_whole(images: Sequence[object], truncation: Truncation | None) -> None:
    if images and truncation is not None:
        message = "truncate_prompt_tokens cannot be used with images: the prompt could begin inside of one"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")


def truncated(token_ids: S, truncation: Truncation | None) -> S:
    """Return the tokens that a truncation keeps."""
    if truncation is None:
        return token_ids
    num_tokens = truncation.num_tokens
    return token_ids[-num_tokens:] if truncation.keeps_last else token_ids[:num_tokens]


def _own_eos_token_ids(tokenizer: Tokenizer | None, vocab_size: int) -> frozenset[int]:
    """Return the tokenizer's end-of-sequence token, if it has one that the model has."""
    token_id = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset() if token_id is None or token_id >= vocab_size else frozenset({token_id})


class InputProcessor:
    """Checks prompts and parameters against the model and the engine's limits, which change with what is pinned.

    `cuts_answers`, of an `LLM`: an answer for which max_tokens leaves no room ends at max_model_len. Without it, for
    servers, such a request is refused, and the `sampling` defaults bound an answer without max_tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, ready: Ready, options: EngineOptions, owners: OwnerLabels | None = None,
        *, cuts_answers: bool = False,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.sampling, self._cuts_answers = ready.sampling, cuts_answers
        self.limits = ready.limits
        self.max_logprobs = ready.vocab_size if options.max_logprobs == -1 else options.max_logprobs
        self.vocab_size = ready.vocab_size
        self._own_eos_token_ids = _own_eos_token_ids(tokenizer, ready.vocab_size)
        self._eos_token_ids = ready.eos_token_ids | self._own_eos_token_ids
        self._other_eos_token_ids = self._eos_token_ids - self._own_eos_token_ids
        self._engine_seed, self._policy = options.seed, options.scheduling_policy
        self.owners = owners or OwnerLabels()
        self._generates = ready.generates
        images = ready.images
        self.images = None if images is None or tokenizer is None else ImagePrompts(images.settings, tokenizer)

    def truncation_of(self, params: SamplingParams, *, keeps_last: bool = True) -> Truncation | None:
        """Return the truncation that parameters ask for. InvalidRequestError if it is longer than max_model_len."""
        num_tokens, longest = params.truncate_prompt_tokens, self.limits.max_model_len
        if num_tokens is None:
            return None
        if num_tokens == -1:
            num_reserved = 1 if self._cuts_answers else params.max_tokens or 1
            return Truncation(max(1, longest - num_reserved), keeps_last)
        check_int("truncate_prompt_tokens", num_tokens, 1, longest)
        return Truncation(num_tokens, keeps_last)

    def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> TokenizedPrompt:
        """Return the prompt's tokens. InvalidRequestError for wrong types, ids out of range, no tokens.

        Without `add_special_tokens` a text gets no beginning-of-sequence token or the like.
        """
        if isinstance(prompt, dict):
            return self._tokenize_dict(prompt, truncation)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer: give token ids", param="prompt")
            return self._encode(self.tokenizer, prompt, truncation, add_special_tokens=add_special_tokens)
        return TokenizedPrompt(None, truncated(self.check_token_ids(prompt), truncation))

    def tokenize_chat(
        self, conversation: Sequence[Message], *, truncation: Truncation | None = None, **how: Any  # noqa: ANN401
    ) -> TokenizedPrompt:
        """Return a conversation rendered by `Tokenizer.apply_chat_template`, and its tokens.

        Parts may be images of the caller's, which are decoded in this process. InvalidRequestError as `tokenize`.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer: chat needs one", param="messages")
        images: Sequence[NumberedImage] = ()
        if self.images is not None:
            conversation, images = self.images.taken(conversation)
            how["marks"] = self.images.marks
        text = self.tokenizer.apply_chat_template(conversation, **how)
        return self.tokenize_rendered(text, truncation=truncation, images=images)

    def tokenize_rendered(
        self, text: str, *, add_special_tokens: bool = False, truncation: Truncation | None = None,
        images: Sequence[NumberedImage] = (),
    ) -> TokenizedPrompt:  # fmt: skip
        """Return the tokens of a rendered chat; its text contains its special tokens, and the marks of its images."""
        assert self.tokenizer is not None, "a chat template comes with a tokenizer"
        if self.images is None or not self.images.needs_places(text):
            return self._encode(self.tokenizer, text, truncation, add_special_tokens=add_special_tokens)
        _check_whole(images, truncation)
        written = self.images.written(text)
        prompt = self._encode(self.tokenizer, written, None, add_special_tokens=add_special_tokens)
        token_ids, placed = self.images.placed(text, prompt.token_ids, images)
        return TokenizedPrompt(written, truncated(token_ids, truncation), images=placed)

    def _encode(
        self, tokenizer: Tokenizer, text: str, truncation: Truncation | None, *, add_special_tokens: bool
    ) -> TokenizedPrompt:
        """Return a text and its tokens; of a truncated one the tokens alone.

        Without truncation a text that is too long for any tokenization is refused before it is tokenized.
        """
        if truncation is not None:
            ids, is_cut = tokenizer.encode_truncated(
                text, truncation.num_tokens, keeps_last=truncation.keeps_last, add_special_tokens=add_special_tokens
            )
            return TokenizedPrompt(None if is_cut else text, self.check_token_ids(ids))
        if len(text) > self.limits.max_model_len:
            self.limits.check_length(tokenizer.min_num_tokens(text))
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return TokenizedPrompt(text, self.check_token_ids(ids))

    def _tokenize_dict(self, prompt: TextPrompt | TokensPrompt, truncation: Truncation | None) -> TokenizedPrompt:
        given, salt = set(prompt), check_cache_salt(prompt.get("cache_salt"))
        if given - {"cache_salt"} == {"prompt"} and isinstance(prompt["prompt"], str):  # type: ignore[typeddict-item]
            text: str = prompt["prompt"]  # type: ignore[typeddict-item]
            return self.tokenize(text, truncation=truncation).salted(salt)
        if given - {"cache_salt", "images"} == {"prompt_token_ids"}:
            token_ids = self.check_token_ids(prompt["prompt_token_ids"])  # type: ignore[typeddict-item]
            images = _checked_images(prompt.get("images", ()), truncation)
            return TokenizedPrompt(None, truncated(token_ids, truncation), salt, images=images)
        raise InvalidRequestError(
            f'a prompt given as a dict must be {{"prompt": str}} or {{"prompt_token_ids": [int, ...]}}, '
            f'with or without "cache_salt": str, '
            f"got keys {shown(', '.join(sorted(map(str, given))))}",
            param="prompt",
        )

    def check_token_ids(self, token_ids: Sequence[int]) -> PackedTokens:
        """Return a prompt's tokens, packed. InvalidRequestError for wrong types, ids out of range, no tokens."""
        if not isinstance(token_ids, (list, tuple)):
            raise InvalidRequestError(
                f"prompt must be text, a list of token ids or a dict of one of them, got {type(token_ids).__name__}",
                param="prompt",
            )
        if not token_ids:
            raise InvalidRequestError("prompt is empty: it must have at least one token", param="prompt")
        packed = array("i")
        for start in range(0, len(token_ids), _IDS_AT_ONCE):
            ids = token_ids[start : start + _IDS_AT_ONCE]
            self._check_ids(ids)
            packed += pack_tokens(ids)
        return packed

    def _check_ids(self, ids: Sequence[object]) -> None:
        """Raise InvalidRequestError for the first that is no token id. By calls that are quick for one that are all."""
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:  # type: ignore[type-var, operator]
            return
        wrong = next(token for token in ids if type(token) is not int or not 0 <= token < self.vocab_size)
        raise InvalidRequestError(
            f"prompt token ids must be integers from 0 to {self.vocab_size - 1}, got {shown(wrong)}", param="prompt"
        )

    def check_params(
        self, params: SamplingParams, beam: BeamSearchParams | None = None, priority: int = 0, *, is_own: bool = False
    ) -> CheckedParams:
        """Return parameters for `prepare`; InvalidRequestError if no prompt can have them. Quick: tokenizes no text.

        With `beam` they are of a beam search; `params` say how many answers it has and how they become text. The lower
        the `priority`, the earlier a request is served; with the policy `fcfs` it must be 0.

        The result has a copy of `params`, checked as at construction, so that later changes have no effect; with
        `is_own` the object itself, made for this call and not changed since.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", param="sampling_params"
            )
        if not is_own:
            params = replace(params)
        if not self._generates:
            raise InvalidRequestError("the model generates no text: it gives embeddings or scores alone", param="model")
        params.check_vocabulary(self.vocab_size)
        names = ["logprobs", "prompt_logprobs"]
        if params.logprob_token_ids:
            params.logprobs = len(params.logprob_token_ids)
            names.remove("logprobs")
        for name in names:
            asked = getattr(params, name)
            if asked == -1:
                asked = self.vocab_size
                setattr(params, name, asked)
            if asked is not None and asked > self.max_logprobs:
                raise InvalidRequestError(
                    f"{name} must be at most {self.max_logprobs} (max_logprobs), got {asked}", param=name
                )
        rows = params.prompt_logprob_token_ids
        if rows is not None and (num_scored := width_of(rows)) > self.max_logprobs:
            raise InvalidRequestError(
                f"prompt_logprob_token_ids must have rows of at most {self.max_logprobs} token ids (max_logprobs), got "
                f"{num_scored}", param="prompt_logprob_token_ids",
            )  # fmt: skip
        if beam is not None:
            self._check_beam_width(beam.beam_width)
        if self.tokenizer is None and params.stop:
            raise InvalidRequestError("the model has no tokenizer: use stop_token_ids instead of stop", param="stop")
        if self.tokenizer is None and params.bad_words:
            raise InvalidRequestError("the model has no tokenizer: bad_words cannot be used", param="bad_words")
        if params.structured_outputs is not None and self.tokenizer is None:
            message = "structured_outputs cannot be used: the model has no tokenizer"
            raise InvalidRequestError(message, param="structured_outputs")
        self.check_priority(priority)
        return CheckedParams(params, beam, priority, self.tokenizer)

    def check_priority(self, priority: int) -> None:
        """Raise InvalidRequestError for a priority out of range, or that the policy does not know."""
        check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        if priority != 0 and self._policy == "fcfs":
            message = f"priority must be 0, the only one with scheduling_policy fcfs, got {priority}"
            raise InvalidRequestError(message, param="priority")

    def prepare(
        self, request_id: int, prompt: TokenizedPrompt, checked: CheckedParams, client_id: str = "", weight: float = 1.0
    ) -> PreparedRequest:
        """Return a request that the scheduler will take. ContextLengthError if one of this length could never run."""
        params, beam = checked.params, checked.beam
        request = self.new_request(request_id, prompt, params, GENERATE if beam is None else BeamTask(beam))
        request.max_tokens = self._resolve_max_tokens(len(prompt.token_ids), params)
        if params.prompt_logprob_token_ids is not None:
            check_num_rows(params.prompt_logprob_token_ids, params.prompt_logprob_start or 0, len(prompt.token_ids))
        if params.bad_words:
            request.bad_words_token_ids = checked.bad_words_token_ids
        request.priority = checked.priority
        request.client_id, request.weight = client_id, weight
        return PreparedRequest(request, prompt)

    def prepare_pin(
        self, request_id: int, prompt: TokenizedPrompt, client_id: str = "", weight: float = 1.0
    ) -> PreparedRequest:
        """Return a request that computes a prefix and pins it; its output is ignored. As `prepare`."""
        prepared = self.prepare(request_id, prompt, self.check_params(ANY_TOKEN), client_id, weight)
        prepared.request.task = PinTask()
        return prepared

    def new_request(
        self, request_id: int, prompt: TokenizedPrompt, params: SamplingParams, task: Task
    ) -> Request:
        """Return a request for a task, which generates no token until its `max_tokens` is set."""
        eos = _NO_IDS if params.ignore_eos else self._eos_token_ids
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=arrival_seed(self._engine_seed, request_id) if params.seed is None else params.seed % NUM_SEEDS,
            max_tokens=0,
            eos_token_ids=eos,
            stop_token_ids=self._stop_token_ids(eos, params.stop_token_ids),
            task=task,
            scope=Scope(prompt.cache_salt, None if prompt.adapter is None else prompt.adapter.digest),
            images=prompt.images,
            adapter_folder="" if prompt.adapter is None else prompt.adapter.folder,
            adapter_name="" if prompt.adapter is None else prompt.adapter.name,
            owner=self.owners.label(prompt.key_number, prompt.cache_salt),
        )

    def _stop_token_ids(self, eos: frozenset[int], named: Sequence[int] | None) -> frozenset[int]:
        """Return the ids that are the stop_reason of a request: not the tokenizer's own end of sequence, as in vLLM."""
        if named:
            return eos.union(named) - (eos & self._own_eos_token_ids)
        return self._other_eos_token_ids if eos else eos

    def _resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return max_tokens, or the most that fits where it is None; raise if it could never run."""
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, params.min_tokens, self.limits.most_tokens(num_prompt_tokens, params.n))
            max_tokens = max_tokens if self._cuts_answers else min(max_tokens, self._most_by_default(params))
        elif self._cuts_answers:
            max_tokens = min(max_tokens, max(1, params.min_tokens, self.limits.max_model_len - num_prompt_tokens))
        self.limits.check_admissible(num_prompt_tokens, max_tokens, params.n)
        return max_tokens

    def _most_by_default(self, params: SamplingParams) -> int:
        """Return the bound on an answer without max_tokens by the defaults; min_tokens may be above it."""
        named = self.sampling.params.get("max_tokens"), self.sampling.max_output_tokens
        return max(params.min_tokens, min((int(each) for each in named if each is not None), default=MAX_INT))

    def _check_beam_width(self, width: int) -> None:
        """Refuse more beams than there are first tokens, or than can run at once."""
        for limit, name in ((self.vocab_size, "the vocabulary size"), (self.limits.max_num_seqs, "max_num_seqs")):
            if width > limit:
                message = f"beam_width must be at most {limit} ({name}), got {width}"
                raise InvalidRequestError(message, param="beam_width")
