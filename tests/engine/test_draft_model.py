"""Draft models: they change no bit, their drafts are those of the model alone, and their memory is planned."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.core.errors import ConfigError, ModelError
from quire.core.speculation import MAX_PENDING, ScratchBlocks
from quire.decoding.sampler import SamplingBatch
from quire.engine.assembly import assemble
from quire.engine.draft_model_loading import load_draft_model
from quire.engine.loading import load
from quire.engine.options import EngineOptions
from quire.execution.batch import IntArray, StepInputs
from quire.execution.drafter import DraftRows
from quire.execution.drafting import draft_model as module
from quire.execution.drafting.draft_model import DraftModel
from quire.execution.drafting.drafters import AdaptiveLength
from quire.kernels.tensors import floats
from quire.model.decoder import Decoder
from quire.model.language_model import ForwardBatch
from quire.model.resolve import DEMO_MODEL
from support.random_model import VOCAB_SIZE, write_random_model
from support.zero_model import write_zero_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no draft models yet")

DEMO_DRAFT = Path(__file__).parents[1] / "data/demo-draft"
HEADER = '"""Queues, and what waits in them."""\n\nimport collections\nimport time\n\n\n'  # more than two blocks
PROMPTS = [HEADER + end for end in ("class Queue:", "def wait(self", "def _get", "import os")] + ["def", HEADER * 4]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, n=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, top_p=0.9, max_tokens=28, n=3),
    SamplingParams(temperature=0.8, seed=2, presence_penalty=0.7, frequency_penalty=0.3, max_tokens=31, logprobs=2),
    SamplingParams(temperature=0.7, seed=3, min_tokens=4, stop=["self", "(\n"], max_tokens=30, top_k=40),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=0, prompt_logprobs=1, max_tokens=30),
    SamplingParams(temperature=0.0, max_tokens=33, bad_words=["import"], logit_bias={300: 1.0}, ignore_eos=True),
]
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"], "additionalProperties": False,
}  # fmt: skip
GRAMMARS = [
    SamplingParams(temperature=t, seed=5, max_tokens=60, structured_outputs=StructuredOutputsParams(**kind))
    for t, kind in product((0.0, 1.0), ({"json": SCHEMA}, {"regex": r"(abcdefgh|[xy]{3})-\d{4}(-[a-z]{3}){2,4}"}))
]
Settings = dict[str, Any]


def speculation(model: Path = DEMO_DRAFT, num_drafts: int = 4) -> Settings:
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": num_drafts}
    return {"speculative_config": config}


class Watch:
    """Counts of verified and accepted drafts, and the drafts of each row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_drafted = self.num_accepted = self.most_pending = self.most_rows = 0
        self.drafted: list[tuple[list[int], list[int]]] = []  # known tokens of a row, and its drafts
        draft, record = DraftModel.draft, AdaptiveLength.record

        def watched(
            model: DraftModel, rows: DraftRows, limits: IntArray, step: StepInputs
        ) -> Mapping[int, Sequence[int]]:
            found = draft(model, rows, limits, step)
            self.most_rows = max(self.most_rows, len(found))
            for row, num_tokens, num_computed in zip(rows.rows, rows.num_tokens, rows.num_computed, strict=True):
                if row in found:
                    self.most_pending = max(self.most_pending, num_tokens - num_computed)
                    known = model._batch.token_ids[row, :num_tokens].tolist()
                    self.drafted.append((known, list(found[row])))
            return found

        def counted(lengths: AdaptiveLength, row: int, num_drafts: int, num_accepted: int) -> None:
            self.num_drafted += num_drafts
            self.num_accepted += num_accepted
            record(lengths, row, num_drafts, num_accepted)

        # As many as there can be: how long a draft should be is another question.
        monkeypatch.setattr(AdaptiveLength, "limits", lambda _self, _rows, longest, _num_rows: longest)
        monkeypatch.setattr(DraftModel, "draft", watched)
        monkeypatch.setattr(AdaptiveLength, "record", counted)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def answers(
    model: Path | None, prompts: Sequence[Any] = PROMPTS, params: Sequence[SamplingParams] = PARAMS, *, times: int = 2,
    **settings: object,
) -> list[object]:  # fmt: skip
    """Return everything that is answered, to twice the same prompts: the second time they are prefix hits."""
    found: list[object] = []
    with LLM(model, **{"max_num_batched_tokens": 48, "num_kv_blocks": 200} | settings) as llm:
        for _ in range(times):
            outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
            for output in outputs:
                found += [
                    (b.text, b.token_ids, b.logprobs, b.cumulative_logprob, b.finish_reason, b.stop_reason)
                    for b in output.outputs
                ]
                found.append(output.prompt_logprobs)
        assert llm.kv_stats().used_blocks == 0
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_blocks": 26, "preemption_mode": "recompute"},
        {"num_kv_blocks": 26, "num_swap_blocks": 40, "preemption_mode": "swap"},
        {"quantization": "int8"},
        {"quantization": "int4", "kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "fp8", "block_size": 8},
        {"dtype": "float32", "block_size": 64, "num_kv_blocks": 60},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    ],
    ids=lambda settings: ", ".join(f"{name} {value}" for name, value in settings.items()) or "room",
)
def test_answers_are_the_same_to_the_bit(settings: Settings, watch: Watch) -> None:
    expected = answers(None, **settings)
    assert not watch.num_drafted
    assert answers(None, **settings, **speculation()) == expected
    assert 0 < watch.num_accepted < watch.num_drafted


def test_rows_with_grammars_are_the_same_to_the_bit(watch: Watch) -> None:
    """Forced tokens are pending: known, and computed by the draft model first."""
    expected = answers(None, PROMPTS[:4], GRAMMARS)
    assert answers(None, PROMPTS[:4], GRAMMARS, **speculation()) == expected
    assert 1 < watch.most_pending <= MAX_PENDING
    assert watch.num_accepted > 0


def test_another_model_as_the_draft_changes_nothing(tmp_path: Path, watch: Watch) -> None:
    """Random weights, another vocabulary, other heads, other layers: hardly a draft is accepted."""
    tokens = [[(7 * i * j + j) % VOCAB_SIZE for j in range(10 + 30 * i)] for i in range(1, 6)]
    folders = [tmp_path / name for name in ("target", "draft")]
    for folder in folders:
        folder.mkdir()
    target = write_random_model(folders[0])
    draft = write_random_draft(folders[1])
    params = [replaced for each in PARAMS[:5] if (replaced := without_text(each))]
    expected = answers(target, tokens, params)
    assert answers(target, tokens, params, **speculation(draft)) == expected
    assert watch.num_drafted > watch.num_accepted


def without_text(params: SamplingParams) -> SamplingParams:
    """Return parameters for a model without a tokenizer."""
    given = {name: getattr(params, name) for name in ("temperature", "seed", "max_tokens", "n", "top_p", "logprobs")}
    return SamplingParams(**given, ignore_eos=True)


def write_random_draft(folder: Path, **changes: object) -> Path:
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3}
    settings = {"head_dim": 16, "max_position_embeddings": 640} | sizes | changes
    write_zero_model(folder, "Qwen2", "bfloat16", **settings)
    generator, weights = torch.Generator().manual_seed(1), load_file(folder / "model.safetensors")
    for weight in weights.values():
        weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    save_file(weights, folder / "model.safetensors")
    return folder


# --- drafts are right -------------------------------------------------------------------------------------------------


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft the likeliest tokens for any parameters, as the draft model alone generates them."""

    def choose(samples: SamplingBatch, logits: Tensor, ops: object) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return floats(logits).argmax(axis=1), np.ones(len(logits), dtype=bool)

    monkeypatch.setattr(module, "choose_drafts", choose)


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_blocks": 26, "num_swap_blocks": 40, "preemption_mode": "swap"},
        {"num_kv_blocks": 52, "block_size": 8, "preemption_mode": "recompute"},
        {"kv_cache_dtype": "int8_per_token_head", "quantization": "int8"},
        {"block_size": 128, "num_kv_blocks": 20},
    ],
    ids=["room", "swap", "recompute", "int8", "large blocks"],
)
def test_drafts_are_what_the_draft_model_alone_generates(settings: Settings, watch: Watch) -> None:
    """Behind prefix hits, forks within a block, chunks, preemptions and rejected drafts."""
    answers(None, [*PROMPTS, *PROMPTS[:4]], [*PARAMS, *GRAMMARS], **settings, **speculation())
    assert watch.most_pending > 1
    own = {name: value for name, value in settings.items() if name in ("kv_cache_dtype", "quantization")}
    some = watch.drafted[:: len(watch.drafted) // 60]
    with LLM(DEMO_DRAFT, num_kv_blocks=400, dtype="bfloat16", **own) as llm:
        for known, drafts in some:
            params = SamplingParams(temperature=0.0, max_tokens=len(drafts), ignore_eos=True)
            (output,) = llm.generate([known], params, use_tqdm=False)
            assert output.outputs[0].token_ids == drafts, f"behind {len(known)} tokens"


def test_k_drafts_take_k_passes(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """The first computes the tokens of the step, too: prompts, chunks of them, verified drafts of some rows."""
    passes, steps, forward, draft = [0], list[tuple[int, int]](), DraftModel._forward, DraftModel.draft

    def counted_pass(model: DraftModel, batch: ForwardBatch, before: Tensor | None, sequences: IntArray) -> Tensor:
        passes[0] += 1
        return forward(model, batch, before, sequences)

    def counted(model: DraftModel, rows: DraftRows, limits: IntArray, step: StepInputs) -> Mapping[int, Sequence[int]]:
        passes[0] = 0
        found = draft(model, rows, limits, step)
        steps.append((passes[0], max(map(len, found.values()), default=0)))
        return found

    monkeypatch.setattr(DraftModel, "_forward", counted_pass)
    monkeypatch.setattr(DraftModel, "draft", counted)
    answers(None, PROMPTS[5:], PARAMS[5:], **speculation())
    answers(None, **speculation(num_drafts=2))
    assert {(num_passes, num_drafts) for num_passes, num_drafts in steps} == {(1, 0), (2, 2), (4, 4)}
    assert watch.num_accepted > 0


def test_model_as_its_own_draft_has_all_greedy_drafts_accepted(watch: Watch) -> None:
    """The same bits with chunks of another size and slots in scratch blocks."""
    params = [SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)] * len(PROMPTS)
    answers(None, PROMPTS, params, speculative_config={"model": str(DEMO_MODEL)})
    assert watch.num_accepted == watch.num_drafted > 300


def test_sampled_drafts_are_accepted_more_often_than_the_likeliest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=60, ignore_eos=True) for i in range(len(PROMPTS))]
    accepted = []
    for half_window in (module.choose_drafts.__globals__["HALF_WINDOW"], 1.0):  # the second: as good as greedy
        monkeypatch.setitem(module.choose_drafts.__globals__, "HALF_WINDOW", half_window)
        with monkeypatch.context() as patched:
            watch = Watch(patched)
            answers(None, PROMPTS, params, **speculation())
        accepted.append(watch.num_accepted / watch.num_drafted)
    assert accepted[0] > accepted[1]


def test_acceptance_of_the_draft_model_of_the_demo_model(watch: Watch) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)] * len(PROMPTS)
    answers(None, PROMPTS, params, **speculation())
    assert watch.num_accepted / watch.num_drafted > 0.25


# --- limits and faults ------------------------------------------------------------------------------------------------


def test_no_draft_behind_the_positions_of_the_draft_model(tmp_path: Path, watch: Watch) -> None:
    """Its rotary tables end at 96: it computes and drafts up to there, and a longer prompt has no drafts."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_random_model(tmp_path / "target")
    draft = write_random_draft(tmp_path / "draft", max_position_embeddings=96)
    tokens = [[(3 * j + i) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((20, 90, 95, 130))]
    params = [SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)] * 4
    expected = answers(target, tokens, params)
    assert answers(target, tokens, params, **speculation(draft)) == expected
    ends = [len(known) + len(drafts) for known, drafts in watch.drafted]
    assert max(ends) == 97, "the last draft is not computed"
    assert min(len(known) for known, _ in watch.drafted) == 21


def test_sliding_windows_of_the_draft_model(tmp_path: Path, watch: Watch) -> None:
    """The target attends to all positions, so blocks behind the draft model's window stay."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_random_model(tmp_path / "target")
    draft = write_random_draft(tmp_path / "draft", sliding_window=24, use_sliding_window=True, max_window_layers=0)
    tokens = [[(3 * j + i) % VOCAB_SIZE for j in range(70)] for i in range(3)]
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 3
    expected = answers(target, tokens, params)
    assert answers(target, tokens, params, **speculation(draft)) == expected
    with LLM(draft, dtype="float32", num_kv_blocks=100) as llm:
        for known, drafts in watch.drafted[::20]:
            (output,) = llm.generate([known], SamplingParams(temperature=0.0, max_tokens=len(drafts), ignore_eos=True))
            assert output.outputs[0].token_ids == drafts


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("draft_window", [None, 40], ids=["draft model without", "draft model with"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_blocks": 17, "preemption_mode": "recompute"},
        {"num_kv_blocks": 17, "num_swap_blocks": 40, "preemption_mode": "swap"},
    ],
    ids=["room", "recompute", "swap"],
)
def test_sliding_windows_of_the_target(
    draft_window: int | None, settings: Settings, tmp_path: Path, watch: Watch
) -> None:
    """Blocks behind both windows are released; those that a layer of either model attends to stay."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_random_model(tmp_path / "target", architectures=["MistralForCausalLM"], sliding_window=24)
    changes = {"use_sliding_window": True, "sliding_window": draft_window, "max_window_layers": 0}
    draft = write_random_draft(tmp_path / "draft", **(changes if draft_window else {}))
    tokens = [[(3 * j + 5 * i) % VOCAB_SIZE for j in range(70 + i)] for i in range(4)]
    params = [SamplingParams(temperature=i % 2 * 0.7, seed=i, max_tokens=50, ignore_eos=True) for i in range(4)]
    expected = answers(target, tokens, params, **settings)
    assert answers(target, tokens, params, **settings, **speculation(draft)) == expected
    alone = [answers(target, tokens[i : i + 1], params[i : i + 1], times=1, **speculation(draft))[0] for i in range(4)]
    assert alone == expected[: 2 * len(alone) : 2]
    some = watch.drafted[::40]
    with LLM(draft, dtype="float32", num_kv_blocks=100) as llm:
        for known, drafts in some:
            (output,) = llm.generate([known], SamplingParams(temperature=0.0, max_tokens=len(drafts), ignore_eos=True))
            assert output.outputs[0].token_ids == drafts


@pytest.mark.parametrize(("draft_window", "released_behind"), [(None, None), (16, 24), (40, 40)])
def test_widest_window_of_both_models_releases_blocks(
    draft_window: int | None, released_behind: int | None, tmp_path: Path
) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_zero_model(tmp_path / "target", "Mistral", "float32", sliding_window=24)
    draft = write_zero_model(tmp_path / "draft", "Mistral", "float32", sliding_window=draft_window)
    options = EngineOptions(str(target), num_kv_blocks=30, block_size=8, spec_model=str(draft))
    engine = assemble(options, loads_tokenizer=False).engine
    assert engine.scheduler.cache.has_window == (released_behind is not None)
    engine.scheduler.cache.create(1)
    for _ in range(60):
        engine.scheduler.cache.append(1, 1)
        engine.scheduler.cache.end_step()
    num_seen = 60 if released_behind is None else released_behind
    assert engine.kv_stats().used_blocks == len({position // 8 for position in range(60 - num_seen, 60)})


def test_only_as_many_rows_are_drafted_as_there_are_scratch_blocks(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.core.speculation.MAX_DRAFTED_ROWS", 2)
    expected = answers(None)
    assert answers(None, **speculation()) == expected
    assert watch.most_rows == 2


@pytest.mark.parametrize("layer", ["0", "1"])
def test_draft_model_with_nan_drafts_nothing_and_fails_nothing(tmp_path: Path, layer: str, watch: Watch) -> None:
    """Keys, values and logits: NaN of a row stay in blocks that other rows are given later."""
    shutil.copytree(DEMO_DRAFT, tmp_path / "draft")
    weights = load_file(tmp_path / "draft/model.safetensors")
    weights[f"model.layers.{layer}.self_attn.v_proj.weight"].fill_(3e38)  # finite, its products are not
    save_file(weights, tmp_path / "draft/model.safetensors")
    expected = answers(None)
    assert answers(None, **speculation(tmp_path / "draft")) == expected
    assert watch.most_rows == 0


@pytest.mark.parametrize("method", ["forward", "logits"])
def test_error_in_the_draft_model_ends_drafts_and_fails_nothing(
    method: str, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(None)
    calls, run = 0, getattr(Decoder, method)

    def failing(self: Decoder, *arguments: Tensor) -> Tensor:
        nonlocal calls
        if self.spec.num_layers == 2:
            calls += 1
            if calls > 20:
                raise RuntimeError("out of something")
        return run(self, *arguments)

    monkeypatch.setattr(Decoder, method, failing)
    assert answers(None, **speculation()) == expected
    assert watch.num_drafted > 0
    assert calls == 21
    assert caplog.text.count("the draft model failed") == 1
    assert "out of something" in caplog.text


# --- what is loaded, and how much memory that takes -------------------------------------------------------------------


def test_memory_of_both_models_is_planned() -> None:
    alone = assemble(EngineOptions(kv_cache_memory="8MiB", max_num_seqs=4), loads_tokenizer=False)
    both = assemble(
        EngineOptions(kv_cache_memory="8MiB", max_num_seqs=4, spec_model=str(DEMO_DRAFT)), loads_tokenizer=False
    )
    draft_bytes = 2 * 2 * 2 * 32 * 2  # bytes of a token: layers, keys and values, heads, head size, bfloat16
    assert both.ready.kv_bytes_per_token == alone.ready.kv_bytes_per_token + draft_bytes
    assert both.ready.weights_bytes - alone.ready.weights_bytes >= 2_900_000
    assert both.ready.num_parameters == alone.ready.num_parameters
    blocks = [each.ready.limits.num_blocks for each in (alone, both)]
    assert blocks == [8 * 2**20 // (16 * each.ready.kv_bytes_per_token) for each in (alone, both)]


def test_scratch_blocks_are_part_of_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = ScratchBlocks.of(4, 4, 16)
    assert (scratch.num_rows, scratch.per_row, scratch.num_blocks) == (4, 3, 12)
    for free_blocks, fits in ((200 + 12, True), (200, False)):
        options = EngineOptions(num_kv_blocks=200, max_num_seqs=4, spec_model=str(DEMO_DRAFT))
        token_bytes = {200: 3072 + 512, 12: 512}
        num_bytes = sum(16 * count * token_bytes[count] for count in ((200, 12) if free_blocks > 200 else (200,)))
        monkeypatch.setattr("quire.execution.device.free_memory_bytes", lambda num_bytes=num_bytes: num_bytes)
        if fits:
            assemble(options, loads_tokenizer=False)
        else:
            with pytest.raises(ConfigError, match="lower num_kv_blocks to at most 19"):
                assemble(options, loads_tokenizer=False)


@pytest.mark.parametrize(("num_drafts", "block_size"), list(product((1, 4, 16), (8, 16, 128))))
def test_scratch_blocks_hold_the_most_tokens_of_a_row(num_drafts: int, block_size: int) -> None:
    per_row = ScratchBlocks.of(num_drafts, 8, block_size).per_row
    num_tokens = block_size - 1 + MAX_PENDING + num_drafts - 1
    assert (per_row - 1) * block_size < num_tokens <= per_row * block_size


def test_dtypes_and_quantization_of_the_target(tmp_path: Path) -> None:
    settings = {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8_per_token_head"}
    with LLM(num_kv_blocks=50, **settings, **speculation()) as llm:  # type: ignore[arg-type]
        worker = llm._engine.engine.executor.worker  # type: ignore[attr-defined]
        draft = worker.compute.drafter._method
    assert draft._model.dtype == np.float32
    assert draft._model.kv_geometry.quantized_dtype == "int8_per_token_head"
    plain = assemble(EngineOptions(dtype="float32", spec_model=str(DEMO_DRAFT)), loads_tokenizer=False)
    assert draft._model.weight_bytes < plain.ready.weights_bytes / 2


@pytest.fixture
def draft_folder(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that writes the demo's draft model, with changes of its config, and a tokenizer."""

    def write(tokenizer: Callable[[dict[str, Any]], None] | None = None, **changes: object) -> Path:
        shutil.copytree(DEMO_DRAFT, tmp_path / "draft")
        config = json.loads((DEMO_DRAFT / "config.json").read_text()) | changes
        (tmp_path / "draft/config.json").write_text(json.dumps(config))
        if tokenizer is not None:
            content = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
            tokenizer(content)
            (tmp_path / "draft/tokenizer.json").write_text(json.dumps(content))
        return tmp_path / "draft"

    return write


def resize(folder: Path, vocab_size: int) -> None:
    """Cut or pad the vocabulary of a tied model, with rows that are the likeliest wherever there is one."""
    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    padding = table[:1].repeat(max(0, vocab_size - len(table)), 1) * 50
    weights["model.embed_tokens.weight"] = torch.cat([table, padding])[:vocab_size].contiguous()
    save_file(weights, folder / "model.safetensors")


def do_nothing(_: dict[str, Any]) -> None:
    """Leave the tokenizer as it is."""


@pytest.mark.parametrize("vocab_size", [4096 - 700, 4096 + 64])
def test_one_tokenizer_padded_to_two_sizes(
    vocab_size: int, draft_folder: Callable[..., Path], watch: Watch
) -> None:
    """Ids that the draft model lacks are computed as another token; ids that the target lacks are never drafted."""
    folder = draft_folder(do_nothing, vocab_size=vocab_size)
    resize(folder, vocab_size)
    expected = answers(None)
    assert answers(None, **speculation(folder)) == expected
    assert watch.num_accepted > 0
    assert all(draft < min(4096, vocab_size) for _, drafts in watch.drafted for draft in drafts)


def test_another_tokenizer_is_refused_with_both_names(draft_folder: Callable[..., Path]) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        names = {token_id: token for token, token_id in vocabulary.items()}
        vocabulary[names[700]], vocabulary[names[701]] = 701, 700

    folder = draft_folder(swap)
    with pytest.raises(ConfigError, match=r"tokenizer \(.*draft\) is not that of the model \(.*demo\): token 700 is"):
        LLM(**speculation(folder))


def test_tokenizer_that_is_spelled_otherwise_is_the_same(draft_folder: Callable[..., Path], watch: Watch) -> None:
    def strip(content: dict[str, Any]) -> None:
        content["post_processor"] = None

    with LLM(num_kv_blocks=50, **speculation(draft_folder(strip))) as llm:
        llm.generate(["def "], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    assert watch.num_drafted > 0


def test_missing_tokenizer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LLM(num_kv_blocks=50, **speculation()).close()
    assert "has no tokenizer; it is taken to be the other model's: both have 4096 tokens" in caplog.text


def test_other_vocabulary_without_a_tokenizer_is_refused_with_both_sizes(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    with pytest.raises(ConfigError, match=f"vocabulary has {VOCAB_SIZE} tokens, that of the model 4096, and .* has no"):
        LLM(**speculation(folder))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"architectures": ["BertForMaskedLM"], "hidden_act": "gelu"}, "no output head over the vocabulary"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": 4000}, "4000"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_broken_draft_model_is_refused_by_name(
    changes: Settings, reason: str, draft_folder: Callable[..., Path]
) -> None:
    folder = draft_folder(**changes)
    with pytest.raises((ConfigError, ModelError), match=reason) as raised:
        LLM(**speculation(folder))
    assert f"speculative_config: draft model {str(folder)!r}: " in str(raised.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "", "a" * 5000, "\0"])
def test_draft_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises((ConfigError, ModelError)):
        LLM(speculative_config={"method": "draft_model", "model": name})


def test_device_cuda_is_refused() -> None:
    options = EngineOptions(spec_model=str(DEMO_DRAFT))
    target = load(options, DEMO_MODEL)
    target.model.device = torch.device("cuda")  # type: ignore[misc]
    assert options.speculation is not None
    with pytest.raises(ConfigError, match="the method draft_model is not supported on device cuda yet"):
        load_draft_model(options, options.speculation, target, DEMO_MODEL)
