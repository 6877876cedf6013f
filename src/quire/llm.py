"""LLM: the offline API. A list of prompts returns a list of outputs in the same order."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, cast

from quire.core.checks import one_each, refuse
from quire.core.displays import html_of_cache, is_watched, table
from quire.core.errors import ConfigError, EngineAsleepError, InvalidRequestError, ModelError
from quire.core.garbage import collections_paused, older_objects_frozen
from quire.core.lora import Adapter, LoRARequest
from quire.core.optional_package import ARGUMENT_NAMES, load
from quire.core.options import declared_options
from quire.core.outputs import (
    EmbeddingRequestOutput,
    KVStats,
    PinnedPrefix,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.core.pooling import PoolingParams
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params
from quire.core.structured_outputs import parse_config
from quire.engine.assembly import AssembledEngine
from quire.engine.messages import TAGS, EngineDeadError, Tag
from quire.engine.metrics.page import Metric, Metrics
from quire.engine.offline_engine import LocalEngine, OfflineEngine
from quire.engine.offline_sessions import OfflineSession, OfflineSessions
from quire.engine.options import EngineOptions
from quire.engine.options.keywords import EngineSettings
from quire.engine.requests.input_processor import (
    CheckedParams,
    InputProcessor,
    PreparedRequest,
    Prompt,
    TokenizedPrompt,
    Truncation,
    check_cache_salt,
)
from quire.engine.requests.output_processor import OutputKind
from quire.engine.requests.pooling_inputs import OfflinePooling
from quire.text.conversation import Message
from quire.text.tokenizer import Tokenizer
from quire.text.tools import Tool

if TYPE_CHECKING:
    from quire.progress import TokenProgress

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
_SETTINGS = {option.name for option in declared_options(EngineOptions)} | {"structured_outputs_config"}


class LLM:
    """A model and an engine in this process, or with `data_parallel_size` several engines in processes of their own.

    `model` is a folder in Hugging Face format, a GGUF file or a hub id, and None is the bundled demo model; the other
    settings are those of EngineOptions, described in docs/reference.md, and `structured_outputs_config`, the options of
    all grammars, as `quire serve` has them. Arguments of vLLM's LLM are known, too, and have no effect, or are refused,
    where docs/coming-from-vllm.md says so. Bad settings raise ConfigError, a broken model ModelError (both are
    ValueErrors). Use it as a context manager, or call `close()`; later calls raise RuntimeError. Not for several
    threads at once.
    """

    __signature__: ClassVar = inspect.signature(EngineOptions)

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        swap_dir: str | Path | None = None,
        kv_disk_dir: str | Path | None = None,
        generation_config: str | Path = "auto",
        override_generation_config: str | Mapping[str, Any] | None = None,
        hf_overrides: str | Mapping[str, Any] = "",
        mm_processor_kwargs: str | Mapping[str, Any] = "",
        speculative_config: str | Mapping[str, Any] | None = None,
        structured_outputs_config: str | Mapping[str, Any] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        paths = (model, tokenizer, swap_dir, kv_disk_dir)
        found, text, swap, disk = (None if path is None else str(path) for path in paths)
        named = settings | {"structured_outputs_config": structured_outputs_config}
        others: dict[str, Any] = load(ARGUMENT_NAMES, "keywords")(named, _SETTINGS)
        self._grammar_config = parse_config(_as_json(others.pop("structured_outputs_config", None)))
        options = EngineOptions(
            found, tokenizer=text, swap_dir=swap, kv_disk_dir=disk, generation_config=str(generation_config),
            override_generation_config=_as_json(override_generation_config), hf_overrides=_as_json(hf_overrides),
            speculative_config=_as_json(speculative_config), mm_processor_kwargs=_as_json(mm_processor_kwargs),
            **others,
        )  # fmt: skip
        self._can_sleep, self._kv_disk_dir = options.enable_sleep_mode, options.kv_disk_dir
        if options.kv_events is not None:
            raise ConfigError("kv_events_config is for servers, which routers send requests to: see `quire serve`")
        if options.kv_role != "none":
            raise ConfigError(f"kv_role {options.kv_role!r} is for servers: see `quire serve`")
        num_engines, self._name = options.data_parallel_size, found or "quire-demo"
        self._metrics = Metrics(self._name, None, num_engines, options)
        with collections_paused():
            self._open: OfflineEngine | None = _start(options, self._metrics)
        self._num_requests = 0                                 # accepted so far; also the next one's id

    def __enter__(self) -> Self:
        _ = self._runner  # raises RuntimeError if closed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the model, its dtype and device, how full the KV cache is, and how many requests there are."""
        if self._open is None:
            return f"<LLM {self._name}, closed>"
        try:
            kv = self._open.kv_stats()
        except EngineAsleepError:
            return f"<LLM {self._name}: asleep>"
        except EngineDeadError:
            return f"<LLM {self._name}: its engines have died>"
        blocks = f"{kv.used_blocks:,} of {kv.total_blocks:,} KV blocks of {kv.block_size} tokens in use"
        return f"<LLM {self._name}: {self._weights(self._open)}, {blocks}, {self._load(self._open)}>"

    def _repr_html_(self) -> str:
        """Return the same as HTML, as a notebook shows it."""
        if self._open is None:
            return table([("model", self._name), ("state", "closed")])
        if self._open.sleeping:
            return table([("model", self._name), ("state", "asleep")])
        about = [("model", self._name), ("weights", self._weights(self._open)), ("load", self._load(self._open))]
        return table(about) + html_of_cache(self._open.kv_stats())

    def _weights(self, engine: OfflineEngine) -> str:
        ready = engine.ready
        kind = f"{ready.dtype}, {ready.quantization}" if ready.quantization else ready.dtype
        return f"{kind} on {ready.device}"

    def _load(self, engine: OfflineEngine) -> str:
        running, waiting = engine.observe(self._metrics.num_requests)
        return f"{running:,} running, {waiting:,} waiting"

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, with all that is cached or pinned in it, and at level 2 the weights as well.

        With `enable_sleep_mode`. Calls that compute raise EngineAsleepError until `wake_up`. An LLM that sleeps at
        level 1 may be sent to level 2. InvalidRequestError for another level, or while an iterator of `stream` is open.
        """
        runner = self._sleepable("sleep")
        if level not in (1, 2):
            refuse("level", level, "1 (the KV cache is freed) or 2 (the weights as well)")
        runner.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the weights and make the KV cache again, of the same sizes; `tags` name one of them, or both.

        Answers have the bits of before, unless the model's files have changed. ConfigError if too little memory is
        free, ModelError if the files are gone or of another model: the LLM sleeps on.
        """
        runner = self._sleepable("wake_up")
        if tags is not None and (isinstance(tags, str) or (unknown := set(tags) - TAGS)):
            refuse("tags", tags if isinstance(tags, str) else unknown, f"a list of {' and '.join(sorted(TAGS))}")
        runner.wake_up(TAGS if tags is None else cast(Sequence[Tag], tags))

    @property
    def is_sleeping(self) -> bool:
        """True if the weights or the KV cache are freed."""
        return bool(self._runner.sleeping)

    def _sleepable(self, method: str) -> OfflineEngine:
        if not self._can_sleep:
            raise ConfigError(f"{method} needs LLM(enable_sleep_mode=True)")
        return self._runner

    def close(self) -> None:
        """Free the weights and the KV cache, and end all requests. Idempotent."""
        if self._open is not None:
            self._open.close()
        self._open = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if its folder has none."""
        return self._runner.tokenizer

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to one below this."""
        return self._runner.ready.vocab_size

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """Return the model's tokenizer, which is that of every adapter as well. ModelError if it has none."""
        if lora_request is not None and not isinstance(lora_request, LoRARequest):
            refuse("lora_request", lora_request, "a LoRARequest or None")
        if self.tokenizer is None:
            raise ModelError("the model has no tokenizer")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request without any: by generation_config, where that says nothing our own."""
        return SamplingParams(**self._runner.ready.sampling.params)  # type: ignore[arg-type]

    @property
    def _runner(self) -> OfflineEngine:
        if self._open is None:
            raise RuntimeError("this LLM is closed")
        return self._open

    @property
    def _engine(self) -> AssembledEngine:
        """The engine in this process, for tests and measurements."""
        assert isinstance(self._runner, LocalEngine), "the engines are in other processes"
        return self._runner.assembled

    @property
    def _inputs(self) -> InputProcessor:
        """The input processor, with the current limits."""
        return self._runner.inputs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Complete every prompt and return the outputs in the order of the prompts.

        A prompt is text, token ids, {"prompt": str} or {"prompt_token_ids": [...]}. `sampling_params` is one for all or
        one per prompt, None the defaults of the model. Every request is checked before any runs: InvalidRequestError
        (a ValueError) names the field, and no request was started. On a terminal and in a notebook a progress bar runs
        unless `use_tqdm` is False. Waiting requests with the lowest `priority` (default 0; one for all or one per
        prompt) are admitted first. `lora_request`: the LoRA adapter of all requests, or one, or None, for each; with
        `enable_lora`.
        """
        tokenized = self._adapted(self._tokenize(prompts, sampling_params), lora_request)
        return self._finish_all(self._prepare(tokenized, sampling_params, priority), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> Iterator[RequestOutput]:
        """Yield the output of a request, cumulative, whenever a step has added to it; `request_id` tells which.

        Requests are numbered "0", "1", ... over the life of this LLM, in the order of the prompts. They are checked
        now, queued at the first `next`, and aborted if the iterator is closed early. Several may run at once.
        """
        tokenized = self._adapted(self._tokenize(prompts, sampling_params), lora_request)
        return self._run(self._prepare(tokenized, sampling_params, priority), "cumulative")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, rendered with `chat_template`, by default the model's.

        With `continue_final_message`, instead of `add_generation_prompt`, the answer continues the last message.
        `tools` are functions in OpenAI's form, which the template describes to the model; calls are text of the answer.
        `chat_template_kwargs` are other variables of the template. `lora_request` as in `generate`. With a model that
        reads images, a part of a content may be one: `{"type": "image", "image": ...}`, with an image of Pillow or the
        path of a file.
        """
        inputs = self._inputs
        how = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
            "tools": tools, "chat_template": chat_template,
        }  # fmt: skip
        variables = chat_template_kwargs or {}
        if taken := sorted(how.keys() & variables.keys()):
            message = f"chat_template_kwargs must have none of the arguments of chat, got {', '.join(taken)}"
            raise InvalidRequestError(message, param="chat_template_kwargs")
        conversations = _conversations(messages)
        truncations = self._truncations(sampling_params, len(conversations))
        tokenized = [
            inputs.tokenize_chat(each, truncation=truncation, **how, **variables)
            for each, truncation in zip(conversations, truncations, strict=True)
        ]
        tokenized = self._adapted(tokenized, lora_request)
        return self._finish_all(self._prepare(tokenized, sampling_params, priority), use_tqdm)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the output of the answer to one conversation, cumulative, whenever a step has added to it.

        Messages as in `chat`, requests as in `stream`.
        """
        tokenized = [self._inputs.tokenize_chat(messages)]
        return self._run(self._prepare(tokenized, sampling_params), "cumulative")

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Search the likeliest continuations of every prompt: `params.beam_width` outputs each, the best first.

        `cumulative_logprob` of an output is the sum of its tokens' logprobs. Errors and `lora_request` as in
        `generate`.
        """
        tokenized = self._adapted(self._tokenize(prompts), lora_request)
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"params must be BeamSearchParams, got {type(params).__name__}", param="params")
        return self._finish_all(self._prepare(tokenized, as_sampling_params(params), beam=params), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of every prompt, in the order of the prompts, of a model that pools (`runner`).

        Prompts, priorities and adapters as for `generate`. `truncate_prompt_tokens`: tokens of a prompt that are kept,
        the first ones; -1: as many as the model takes. InvalidRequestError as `generate`, and for a model that does not
        pool.
        """
        pooling = self._pooling(use_tqdm)  # raises RuntimeError if closed, before any other error
        tokenized = pooling.tokenize(_as_list(prompts), truncate_prompt_tokens)
        return pooling.embed(self._adapted(tokenized, lora_request), pooling_params, priority)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of every pair: one text for all of `data_2`, or as many as it has.

        A reranker reads each pair as one prompt, with the `instruction`; the score is between 0 and 1. With an embedder
        it is the cosine of both embeddings. Other arguments and errors as in `embed`.
        """
        params = pooling_params or PoolingParams()
        return self._pooling(use_tqdm).score(data_1, data_2, params, instruction, truncate_prompt_tokens, priority)

    def _pooling(self, use_tqdm: bool) -> OfflinePooling:
        """Return what makes requests for vectors of the arguments of a call. RuntimeError if closed."""
        inputs, ready = self._inputs, self._runner.ready

        def finish(prepared: list[PreparedRequest]) -> list[RequestOutput]:
            self._num_requests += len(prepared)
            return self._finish_all(prepared, use_tqdm)

        return OfflinePooling(inputs, ready, self._num_requests, finish)

    def pin_prefix(self, prefix: Prompt) -> PinnedPrefix:
        """Compute a prefix once and keep it until it is unpinned: prompts that begin with it compute the rest only.

        A prefix is a prompt as for `generate`; one with a salt serves prompts with the same salt. Pinned twice, it
        gets two ids, and its blocks are stored once. InvalidRequestError if a request of max_model_len, or one that is
        running or waiting, could not run beside it.
        """
        inputs = self._inputs
        prepared = inputs.prepare_pin(next(self._runner.pinned.request_ids), inputs.tokenize(prefix))
        try:
            self._finish_all([prepared], use_tqdm=False)
            return self._runner.pinned.add(prepared.request)
        except BaseException:
            self._runner.unpin(prepared.request.request_id)
            raise

    def unpin_prefix(self, prefix_id: str) -> None:
        """Unpin a prefix; requests that use it continue. UnknownPrefixError if there is none of that id."""
        runner = self._runner  # raises RuntimeError if closed
        runner.unpin(runner.pinned.remove(prefix_id))

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Return the pinned prefixes in the order of pinning."""
        return [pin.prefix for pin in self._runner.pinned.of_key(None)]

    def create_session(
        self, prompt: Prompt | Sequence[Message], *, lora_request: LoRARequest | None = None
    ) -> OfflineSession:
        """Compute a prompt and pin it as a session, which prompts continue: `session.prompt("And then?")`.

        It may be a conversation as in `chat`, which may have images, rendered without the beginning of an answer.
        Errors as in `pin_prefix`. A session can be saved, and restored after a restart.
        """
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            messages = cast("Sequence[Message]", prompt)
            tokenized = self._inputs.tokenize_chat(messages, add_generation_prompt=False)
        else:
            tokenized = self._inputs.tokenize(cast("Prompt", prompt))
        return self._sessions.create(tokenized.adapted(self._adapter(lora_request)))

    def restore_session(
        self, name: str, *, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> OfflineSession:
        """Return a session that was saved in `kv_disk_dir`, by an LLM or a server without keys.

        Its full blocks are loaded, the rest is computed. SessionError if there is none of that name, or if it is of
        another model, salt, adapter or arithmetic: the text names what differs.
        """
        return self._sessions.restore(name, check_cache_salt(cache_salt), self._adapter(lora_request))

    def saved_sessions(self) -> list[str]:
        """Return the names of the saved sessions."""
        return self._sessions.names()

    def delete_saved_session(self, name: str) -> None:
        """Delete a saved session. SessionError if there is none of that name."""
        self._sessions.delete_saved(name)

    @property
    def _sessions(self) -> OfflineSessions:
        def finish(prepared: PreparedRequest) -> None:
            self._finish_all([prepared], use_tqdm=False)

        return OfflineSessions(self._runner, finish, self._name, self._kv_disk_dir)

    def kv_stats(self) -> KVStats:
        """Return the state of the KV cache between two steps; of several engines the sum."""
        return self._runner.kv_stats()

    def get_metrics(self) -> list[Metric]:
        """Return all metrics of /metrics but those of calls and of the process, as objects."""
        return self._runner.observe(self._metrics.values)

    # --- requests -------------------------------------------------------------------------------------------------

    def _tokenize(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[TokenizedPrompt]:
        tokenize = self._inputs.tokenize  # raises RuntimeError if closed, before any other error
        listed = _as_list(prompts)
        truncations = self._truncations(sampling_params, len(listed))
        return [tokenize(prompt, truncation=each) for prompt, each in zip(listed, truncations, strict=True)]

    def _adapted(self, prompts: list[TokenizedPrompt], lora_request: LoRARequests) -> list[TokenizedPrompt]:
        """Return the prompts with their adapters. InvalidRequestError for one that cannot be read."""
        if lora_request is None:
            return prompts
        given = one_each("lora_request", lora_request, None, len(prompts))
        return [prompt.adapted(self._adapter(each)) for prompt, each in zip(prompts, given, strict=True)]

    def _adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        if lora_request is None:
            return None
        if not isinstance(lora_request, LoRARequest):
            refuse("lora_request", lora_request, "a LoRARequest")
        try:
            return self._runner.read_adapter(lora_request.lora_path)._replace(name=lora_request.lora_name)
        except ModelError as error:
            raise InvalidRequestError(str(error), param="lora_request") from error

    def _truncations(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[Truncation | None]:
        """Return how each prompt is truncated; parameters of a wrong type are refused later."""
        given = one_each("sampling_params", sampling_params, SamplingParams(), num_prompts)
        return [self._inputs.truncation_of(own) if isinstance(own, SamplingParams) else None for own in given]

    def _prepare(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        beam: BeamSearchParams | None = None,
    ) -> list[PreparedRequest]:
        """Check every request and queue none. A refused call uses up no request ids: seeds derive from them."""
        inputs, prepared = self._inputs, list[PreparedRequest]()
        params = one_each("sampling_params", sampling_params, self.get_default_sampling_params(), len(prompts))
        priorities = one_each("priority", priority, 0, len(prompts))
        asked = zip(prompts, params, priorities, strict=True)
        checked: CheckedParams | None = None
        last: SamplingParams | None = None
        # Compared by identity: requests mostly share one object, and True, which is refused as a priority, equals 1.
        with older_objects_frozen():
            for request_id, (prompt, own, level) in enumerate(asked, self._num_requests):
                if checked is None or own is not last or level is not checked.priority:
                    checked, last = inputs.check_params(own, beam, level), own
                    self._check_grammar(checked.params)
                prepared.append(inputs.prepare(request_id, prompt, checked))
        self._num_requests += len(prepared)
        return prepared

    def _check_grammar(self, params: SamplingParams) -> None:
        """Set the options of all grammars in a copy of a caller's parameters, before any request of the call is queued.

        Raises InvalidRequestError for a grammar that cannot be compiled.
        """
        if params.structured_outputs is None:
            return
        params.structured_outputs = self._grammar_config.with_defaults(params.structured_outputs)
        self._runner.check_grammar(params.structured_outputs)

    def _finish_all(self, requests: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with older_objects_frozen(), self._progress(requests, use_tqdm) as progress:
            for output in self._run(requests, "final"):
                finished[output.request_id] = output
                if progress is not None:
                    progress.ended(output)
        return [finished[str(prepared.request.request_id)] for prepared in requests]

    def _progress(
        self, requests: list[PreparedRequest], use_tqdm: bool
    ) -> AbstractContextManager["TokenProgress | None"]:
        """Return a bar where a person sees it, else None."""
        if not use_tqdm or not is_watched():
            return nullcontext()
        from quire.progress import TokenProgress  # noqa: PLC0415 (0.02 s, with rich)

        return TokenProgress(requests, self._metrics.num_tokens)

    def _run(self, requests: list[PreparedRequest], kind: OutputKind) -> Iterator[RequestOutput]:
        """Queue the requests at the first `next`, yield their outputs. On exit all of them have ended."""
        return self._runner.run(requests, kind)


def _start(options: EngineOptions, metrics: Metrics) -> OfflineEngine:
    """Return the engine of an LLM, or its engines."""
    if options.data_parallel_size == 1:
        return LocalEngine(options, metrics.engines[0])
    from quire.engine.fleet.offline_fleet import BlockingFleet  # noqa: PLC0415 (0.04 s, with asyncio)

    return BlockingFleet(options, metrics)


def _as_json(given: str | Mapping[str, Any] | None) -> str:
    """Return a setting that may be given as an object, as JSON; empty for none."""
    return json.dumps(dict(given)) if isinstance(given, Mapping) else given or ""


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A list of integers is one prompt; any other list is a list of prompts."""
    if isinstance(prompts, (str, dict)):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}", param="prompt"
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(list[int], list(prompts))]
    return cast(list[Prompt], list(prompts))


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return a list of conversations. A list of lists is one; messages are checked by the template."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(
            f"messages must be a list of messages or a list of such lists, got {type(messages).__name__}",
            param="messages",
        )
    if messages and all(isinstance(item, (list, tuple)) for item in messages):
        return list(cast(Sequence[Sequence[Message]], messages))
    return [cast(Sequence[Message], messages)]
