"""LLM: the offline API. Prompts go in as a list, finished outputs come back in the same order."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.core.beam_search_params import BeamSearchParams, as_sampling_params
from quire.core.errors import InvalidRequestError
from quire.core.outputs import KVStats, PinnedPrefix, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.engine.assembly import AssembledEngine, assemble
from quire.engine.device import give_back_device_memory
from quire.engine.input_processor import InputProcessor, Prompt, TokenizedPrompt
from quire.engine.options import EngineOptions
from quire.engine.output_processor import OutputProcessor
from quire.engine.pinned_prefixes import PinnedPrefixes
from quire.text.chat_template import Message
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")


class LLM:
    """A model and an engine in this process.

    `model` is a folder in Hugging Face format or a hub id, and None is the bundled demo model; docs/reference.md tells
    what each setting means. Bad settings raise ConfigError, a broken model folder ModelError (both are ValueErrors).
    Use it as a context manager, or call `close()`; after that every call raises RuntimeError. Not for use from several
    threads at once.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_memory: int | str | None = None,
        num_kv_blocks: int | None = None,
        swap_space: int | str | None = None,
        num_swap_blocks: int | None = None,
        swap_dir: str | Path | None = None,
        gpu_memory_utilization: float = 0.9,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        preemption_mode: str = "auto",
        memory_policy: str = "paged",
        batching: str = "continuous",
        tensor_parallel_size: int = 1,
        seed: int = 0,
        max_logprobs: int = 20,
        cpu_isa: str = "auto",
    ) -> None:
        options = EngineOptions(
            model=None if model is None else str(model),
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            num_kv_blocks=num_kv_blocks,
            swap_space=swap_space,
            num_swap_blocks=num_swap_blocks,
            swap_dir=None if swap_dir is None else str(swap_dir),
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            preemption_mode=preemption_mode,
            memory_policy=memory_policy,
            batching=batching,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            max_logprobs=max_logprobs,
            cpu_isa=cpu_isa,
        )
        self._assembled: AssembledEngine | None = assemble(options, takes_text=True)
        self._outputs = OutputProcessor(self._assembled.tokenizer)
        self._pinned = PinnedPrefixes(self._assembled.inputs.limits.block_size)
        self._num_requests = 0                           # accepted so far; also the next one's id
        self._unclaimed: dict[str, RequestOutput] = {}   # outputs for another iterator than the one that stepped
        self._faults: dict[str, Exception] = {}          # of requests that have failed, until they are told

    def __enter__(self) -> Self:
        _ = self._engine  # a closed one cannot be entered
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back: weights, KV cache, what still runs. Closing twice is fine."""
        self._assembled = None
        give_back_device_memory()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if its folder has none."""
        return self._engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to one below this."""
        return self._engine.model.spec.vocab_size

    @property
    def _engine(self) -> AssembledEngine:
        if self._assembled is None:
            raise RuntimeError("this LLM is closed")
        return self._assembled

    @property
    def _inputs(self) -> InputProcessor:
        """What checks requests, by the limits as they are now."""
        assembled = self._engine
        assembled.inputs.limits = assembled.engine.scheduler.limits
        return assembled.inputs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt and return the outputs in the order of the prompts.

        A prompt is text, token ids, {"prompt": str} or {"prompt_token_ids": [...]}. `sampling_params` is one for all
        or one per prompt. Everything is checked before anything runs: InvalidRequestError (a ValueError) names what
        is wrong, and nothing was started. On a terminal a progress bar runs unless `use_tqdm` is False. Of those that
        wait, the ones with the lowest `priority` (0 if none is given), one for all or one per prompt, run first.
        """
        tokenized = [self._engine.inputs.tokenize(prompt) for prompt in _as_list(prompts)]
        return self._finish_all(self._make_requests(tokenized, sampling_params, priority=priority), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the output of a request, cumulative, whenever a step has added to it; `request_id` tells which.

        Requests are numbered "0", "1", ... over the life of this LLM, in the order of the prompts. They are checked
        now, queued at the first `next`, and aborted if the iterator is left early. Several may run at once.
        """
        tokenized = [self._engine.inputs.tokenize(prompt) for prompt in _as_list(prompts)]
        return self._run(self._make_requests(tokenized, sampling_params), stream=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, rendered with the model's chat template.

        With `continue_final_message`, instead of `add_generation_prompt`, the last message is what the answer goes on.
        """
        inputs = self._engine.inputs
        tokenized = [
            inputs.tokenize_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in _conversations(messages)
        ]
        return self._finish_all(self._make_requests(tokenized, sampling_params), use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Search the likeliest continuations of every prompt: `params.beam_width` outputs each, the best first.

        `cumulative_logprob` of an output is the sum of its tokens' logprobs. Errors as in `generate`.
        """
        tokenized = [self._engine.inputs.tokenize(prompt) for prompt in _as_list(prompts)]
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"params must be BeamSearchParams, got {type(params).__name__}", param="params")
        return self._finish_all(self._make_requests(tokenized, as_sampling_params(params), params), use_tqdm)

    def pin_prefix(self, prefix: Prompt) -> PinnedPrefix:
        """Compute a prefix once and keep it until it is unpinned: prompts that begin with it compute the rest only.

        A prefix is a prompt as for `generate`; one with a salt serves prompts with the same salt. Pinned twice, it
        gets two ids, and its blocks are stored once. InvalidRequestError if what was promised would break: a request
        of max_model_len, or one that is under way, could not run beside it.
        """
        prompt = self._inputs.tokenize(prefix)
        request = self._inputs.make_pin(self._pinned.next_request_id(), prompt)
        try:
            self._finish_all([(request, prompt)], use_tqdm=False)
            return self._pinned.add(request)
        except BaseException:
            self._abort({str(request.request_id)})
            raise

    def unpin_prefix(self, prefix_id: str) -> None:
        """Let a pinned prefix go; what uses it goes on. UnknownPrefixError if it is not here (any more)."""
        engine = self._engine.engine
        engine.abort(self._pinned.remove(prefix_id))

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Return what is pinned, in the order in which it was."""
        _ = self._engine  # a closed LLM says so
        return list(self._pinned)

    def kv_stats(self) -> KVStats:
        """Return the state of the KV cache between two steps."""
        return self._engine.engine.kv_stats()

    # --- the loop -------------------------------------------------------------------------------------------------

    def _make_requests(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        beam: BeamSearchParams | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[tuple[Request, TokenizedPrompt]]:
        """Check every request and queue none. A refused call uses no request id up: seeds derive from them."""
        inputs = self._inputs
        params = _one_each("sampling_params", sampling_params, SamplingParams(), len(prompts))
        priorities = _one_each("priority", priority, 0, len(prompts))
        asked = zip(prompts, params, priorities, strict=True)
        requests = [
            (inputs.make_request(request_id, prompt, own, beam, level), prompt)
            for request_id, (prompt, own, level) in enumerate(asked, start=self._num_requests)
        ]
        self._num_requests += len(requests)
        return requests

    def _finish_all(self, requests: list[tuple[Request, TokenizedPrompt]], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with _progress_bar(shown=use_tqdm and sys.stderr.isatty()) as progress:
            task = progress.add_task("requests", total=len(requests))
            for output in self._run(requests, stream=False):
                finished[output.request_id] = output
                progress.advance(task)
        return [finished[str(request.request_id)] for request, _ in requests]

    def _run(self, requests: list[tuple[Request, TokenizedPrompt]], *, stream: bool) -> Iterator[RequestOutput]:
        """Queue the requests, step until they are done, yield their outputs. None of them is left behind."""
        left = {str(request.request_id) for request, _ in requests}
        try:
            self._queue(requests, stream)
            while left:
                for request_id in left & self._faults.keys():
                    raise self._faults[request_id]
                if not (self._engine.engine.scheduler.has_requests or left & self._unclaimed.keys()):
                    raise RuntimeError(f"a failed step of another call has ended request {min(left)}")
                for output in self._step():
                    self._unclaimed[output.request_id] = output
                for request_id in [ours for ours in self._unclaimed if ours in left]:
                    output = self._unclaimed.pop(request_id)
                    if output.finished:
                        left.discard(request_id)
                    yield output
        finally:
            if self._assembled is not None:
                self._abort(left)

    def _queue(self, requests: list[tuple[Request, TokenizedPrompt]], stream: bool) -> None:
        arrival_s = time.monotonic()
        for request, prompt in requests:
            self._engine.engine.add(request)
            self._outputs.add(
                request.request_id,
                external_id=str(request.request_id),
                prompt=prompt.text,
                prompt_token_ids=prompt.token_ids,
                params=request.params,
                arrival_s=arrival_s,
                kind="cumulative" if stream else "final",
            )

    def _step(self) -> list[RequestOutput]:
        """Run one step of the engine; return the outputs that it touched."""
        engine = self._engine.engine
        started_s = time.monotonic()
        deltas = engine.step()
        try:
            self._outputs.note_preempted(engine.scheduler.preempted, started_s)
            self._outputs.note_admitted(engine.admissions, started_s)
            processed = self._outputs.process(deltas, time.monotonic())
            outputs = [self._outputs.output(request_id) for request_id in processed.ready]
        except BaseException:
            self._abort({str(delta.request_id) for delta in deltas})  # their new tokens are lost
            raise
        for request_id, index in processed.finish:
            engine.finish(request_id, index)
        for request_id, error in processed.failed:
            engine.abort(request_id)
            self._faults[str(request_id)] = error
        return outputs

    def _abort(self, request_ids: set[str]) -> None:
        """End what is still there of these requests: the iterator was left early, or a step failed."""
        for request_id in request_ids:
            self._unclaimed.pop(request_id, None)
            self._faults.pop(request_id, None)
            self._engine.engine.abort(int(request_id))
            self._outputs.drop(int(request_id))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from a list of them: token ids are a list of integers, everything else in a list is a prompt."""
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
    """Tell one conversation from a list of them: a conversation holds messages. What those hold the template checks."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(
            f"messages must be a list of messages or a list of such lists, got {type(messages).__name__}",
            param="messages",
        )
    if messages and all(isinstance(item, (list, tuple)) for item in messages):
        return list(cast(Sequence[Sequence[Message]], messages))
    return [cast(Sequence[Message], messages)]


def _one_each(name: str, given: T | Sequence[T] | None, default: T, num_prompts: int) -> list[T]:
    """Return one value per prompt, of those that were given for all or for each."""
    if not isinstance(given, (list, tuple)):
        return [default if given is None else cast(T, given)] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequestError(
            f"{name} must be one for all or one per prompt: got {len(given)} for {num_prompts} prompts", param=name
        )
    return list(given)


def _progress_bar(*, shown: bool) -> Progress:
    """Return a progress bar on the error stream, so that a redirected output stays clean."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown)
