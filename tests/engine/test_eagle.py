"""EAGLE-3 heads: they change no bit, have vLLM's logits, read what they were trained on, and fit or are refused."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from quire import LLM
from quire.core.errors import ConfigError, ModelError
from quire.engine.assembly import assemble
from quire.engine.options import EngineOptions
from quire.execution.drafting.draft_model import HeadDrafter, Spans
from quire.extension.isas import usable_isas
from quire.kernels.choice import choose_back_end
from quire.kernels.tensors import floats, take_rows
from quire.model.config_reader import ConfigReader
from quire.model.eagle import EagleHead
from quire.model.eagle_config import eagle_spec, fitted, read_eagle
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import load_model
from quire.model.quantization import UNQUANTIZED
from quire.model.weights import WeightReader
from quire_lab.sim.hardware import Hardware
from quire_lab.sim.models import read_draft_model, read_model
from quire_lab.sim.planning import plan_memory
from support.answers import answers_of
from support.every_way import CASES, ISAS, VOCAB_SIZE, asked, check_all_at_once
from support.head_drafts import (  # noqa: F401 (fixtures)
    Acceptance,
    acceptance,
    answers,
    as_many_as_possible,
    ask_oracle,
    drafts,
    following,
    no_failure,
    no_tails,
    shifted_states,
    shifted_tokens,
    tails_of_rejected_drafts,
)
from support.random_folder import write_folder, write_random_folder, write_random_head

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no EAGLE-3 heads yet"),
    pytest.mark.usefixtures("no_failure"),
]

Config = dict[str, object]
SIZES: Config = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
TARGETS: dict[str, Config] = {
    "llama": SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8},
    "qwen3": SIZES | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 7},
    "qwen3.5": SIZES | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "full_attention_interval": 2,
    },
    "gemma2": SIZES | {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4, "query_pre_attn_scalar": 16},
    "plain kernels": SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 7, "head_dim": 12},
}  # fmt: skip
# As `LlamaForCausalLMEagle3` in published folders: some tokens are drafted, embeddings are the target's.
PLAIN: Config = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 60,
    "max_position_embeddings": 32,
}  # fmt: skip
# As the library speculators writes them, with all that a head may have.
SPECULATOR: Config = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 40,
    "norm_before_residual": True, "fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "transformer_layer_config": SIZES | {"model_type": "qwen3", "num_hidden_layers": 1},
}  # fmt: skip
HEADS: dict[str, tuple[Config, tuple[str, ...]]] = {
    "llama": (PLAIN, ("midlayer.",)),
    "qwen3": (SPECULATOR, ("embed_tokens.weight",)),
    "qwen3.5": (PLAIN | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, ()),
    "gemma2": (PLAIN | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "draft_vocab_size": None}, ()),
    "plain kernels": (PLAIN | {"head_dim": 12}, ()),
}


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that writes a random model of a family, and its head, once."""
    written = dict[str, tuple[Path, Path]]()

    def folders(name: str) -> tuple[Path, Path]:
        if name not in written:
            folder, (config, names) = tmp_path_factory.mktemp("eagle"), HEADS[name]
            target = write_random_folder(folder / "target", TARGETS[name])
            written[name] = target, write_random_head(folder / "head", config, *names)
        return written[name]

    return folders


def drafts_of(head: Path, num_drafts: int = 3) -> dict[str, object]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_drafts}


# --- no bit changes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("isa", "dtype", "mode"), [
    (*case, ("swap", "recompute")[place % 2]) for place, case in enumerate(CASES)
])  # fmt: skip
@pytest.mark.usefixtures("drafts")
def test_every_way_of_serving_a_hybrid_has_the_bits_of_a_plain_run(
    folders_of: Callable[[str], tuple[Path, Path]], isa: str, dtype: str, mode: str
) -> None:
    """Hits, rejected drafts, preemptions, chunks and forks, with NaN in all that is free; drafts are the same, too.

    There are no hits inside of a block, behind which the state of one token counts as zeros.
    """
    target, head = folders_of("qwen3.5")
    check_all_at_once(target, isa, dtype, mode, "eagle3", head, num_state_slots=30)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "qwen3.5"])
def test_every_way_of_serving_other_families_has_the_bits_of_a_plain_run(
    folders_of: Callable[[str], tuple[Path, Path]], name: str
) -> None:
    isa = "auto" if name == "plain kernels" else ISAS[0]  # PyTorch computes heads of 12 dimensions
    check_all_at_once(folders_of(name)[0], isa, "bfloat16", "recompute", "eagle3", folders_of(name)[1])


@pytest.mark.parametrize("settings", [
    {"quantization": "int8"}, {"kv_cache_dtype": "int8_per_token_head", "enable_prefix_caching": False},
    {"dtype": "float16"},
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("as_many_as_possible")
def test_answers_with_the_head_s_own_drafts(
    folders_of: Callable[[str], tuple[Path, Path]], settings: dict[str, Any]
) -> None:
    (prompts, params), (target, head) = asked(), folders_of("llama")
    expected = answers(target, params, prompts, **settings)
    assert answers(target, params, prompts, speculative_config=drafts_of(head), **settings) == expected


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.usefixtures("as_many_as_possible", "drafts", "tests_frozen")
def test_drafts_behind_sleep_are_those_before(folders_of: Callable[[str], tuple[Path, Path]], level: int) -> None:
    (prompts, params), (target, head) = asked(), folders_of("llama")
    settings = {"max_model_len": 160, "enable_sleep_mode": True}
    with LLM(target, speculative_config=drafts_of(head), **settings) as llm:
        found = []
        for _ in range(2):
            found.append([answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)])
            llm.sleep(level=level)
            llm.wake_up()
    assert found[0] == found[1]


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize(("name", "num_ranks", "mode"), [("llama", 2, "reduce"), ("qwen3.5", 3, "gather")])
@pytest.mark.usefixtures("as_many_as_possible", "drafts", "forked_processes")
def test_ranks_have_the_bits_and_drafts_of_one_process(
    folders_of: Callable[[str], tuple[Path, Path]], name: str, num_ranks: int, mode: str
) -> None:
    """As in `test_mtp`: ranks that reduce have bits of their own, hits inside of blocks other drafts."""
    (prompts, params), (target, head) = asked(), folders_of(name)
    caching = {"enable_prefix_caching": name == "qwen3.5"}
    settings = caching | {"tensor_parallel_size": num_ranks, "tensor_parallel_mode": mode}
    alone = caching | {"speculative_config": drafts_of(head)} if mode == "gather" else settings
    expected = answers(target, params, prompts, **alone)
    assert answers(target, params, prompts, speculative_config=drafts_of(head), **settings) == expected


@pytest.mark.parametrize("fault", [no_tails, tails_of_rejected_drafts])
@pytest.mark.usefixtures("drafts")
def test_other_hidden_states_before_a_step_would_show(
    folders_of: Callable[[str], tuple[Path, Path]], fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fault(monkeypatch)
    target, head = folders_of("qwen3.5")
    with pytest.raises(AssertionError, match="other drafts behind"):
        check_all_at_once(target, ISAS[0], "bfloat16", "swap", "eagle3", head, num_state_slots=30)


# --- tokens, hidden states and positions are those of training --------------------------------------------------------

ORACLE = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": VOCAB_SIZE, "head_dim": 192,
    "num_attention_heads": 1, "num_key_value_heads": 1, "norm_before_residual": True,
}  # fmt: skip
GAIN = 64.0  # factor on what the head adds to its stream


def write_oracle(folder: Path, reads: str) -> tuple[Path, Path]:
    """Write a model that continues each token by `following`, and a head that reads one of its inputs alone.

    No layer of the model adds anything to an embedding, and each embedding is a unit vector. The head's attention finds
    the token itself by its embedding, or the one before by its position; or its feed-forward permutes a hidden state so
    that it is that of the next token.
    """
    target = write_random_folder(folder / "target", TARGETS["llama"] | {"hidden_size": VOCAB_SIZE})
    weights, units = load_file(target / "model.safetensors"), torch.eye(VOCAB_SIZE)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    permuted = torch.zeros_like(units)
    permuted[[following(token) for token in range(VOCAB_SIZE)], list(range(VOCAB_SIZE))] = 1
    weights |= {"model.embed_tokens.weight": units, "lm_head.weight": permuted, "model.norm.weight": torch.ones(96)}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, target / "model.safetensors")
    head = write_random_head(folder / "head", ORACLE)
    weights = load_file(head / "model.safetensors")
    for name, weight in weights.items():
        weight.fill_(1.0 if "norm" in name else 0.0)
    stem, first = "layers.0.self_attn.", [*range(VOCAB_SIZE)]
    weights["lm_head.weight"] = permuted
    weights[f"{stem}v_proj.weight"][first, first] = 1
    if reads == "embedding":
        for name in ("q_proj", "k_proj"):
            weights[f"{stem}{name}.weight"][first, first] = 3.0  # no pair of dimensions is of two tokens
        weights[f"{stem}o_proj.weight"][:, :VOCAB_SIZE] = units * GAIN
    elif reads == "token before":
        turned = 10_000.0 ** -(torch.arange(12) / 96)  # radians per position of the first pairs
        weights[f"{stem}q_proj.weight"][:12, :VOCAB_SIZE] = 4.0
        weights[f"{stem}k_proj.weight"][:12, :VOCAB_SIZE] = 4.0 * turned.cos()[:, None]
        weights[f"{stem}k_proj.weight"][96:108, :VOCAB_SIZE] = 4.0 * turned.sin()[:, None]
        weights[f"{stem}o_proj.weight"][:, :VOCAB_SIZE] = permuted * GAIN
    else:
        weights["fc.weight"][:, :VOCAB_SIZE] = units
        for name in ("gate_proj", "up_proj"):
            weights[f"layers.0.mlp.{name}.weight"] = units.clone()
        weights["layers.0.mlp.down_proj.weight"] = permuted * GAIN
    save_file({name: weight.contiguous() for name, weight in weights.items()}, head / "model.safetensors")
    return target, head


@pytest.mark.parametrize("reads", ["embedding", "token before", "hidden state"])
@pytest.mark.usefixtures("as_many_as_possible")
def test_heads_that_know_the_next_token_are_always_right(
    tmp_path: Path, reads: str, acceptance: Acceptance  # noqa: F811
) -> None:
    """Also for the first draft of each request, of several in a row, behind hits, chunks, forks and preemptions."""
    target, head = write_oracle(tmp_path, reads)
    preempted = {"num_kv_blocks": 34, "preemption_mode": "swap", "num_swap_blocks": 60}
    for settings in ({}, preempted):
        ask_oracle(target, speculative_config=drafts_of(head), **settings)
    assert acceptance.num_accepted == acceptance.num_drafted > 300


def late_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts behind the first have the position of the token before."""
    batch_of = HeadDrafter._batch_of

    def shifted(self: HeadDrafter, spans: Spans, tables: NDArray[np.int32]) -> ForwardBatch:
        batch = batch_of(self, spans, tables)
        return replace(batch, positions=batch.positions - (len(batch.token_ids) == len(spans.rows)))

    monkeypatch.setattr(HeadDrafter, "_batch_of", shifted)


@pytest.mark.parametrize(("reads", "fault"), [
    ("embedding", shifted_tokens), ("token before", late_positions), ("hidden state", shifted_states),
])  # fmt: skip
@pytest.mark.usefixtures("as_many_as_possible")
def test_a_shift_by_one_would_show(
    tmp_path: Path, reads: str, fault: Callable[[pytest.MonkeyPatch], None], acceptance: Acceptance,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target, head = write_oracle(tmp_path, reads)
    fault(monkeypatch)
    ask_oracle(target, speculative_config=drafts_of(head))
    assert acceptance.num_accepted < 0.9 * acceptance.num_drafted


# --- the head's logits are vLLM's -------------------------------------------------------------------------------------


class Reference:
    """vLLM's formulas (`llama_eagle3.py`, `qwen3_eagle3.py`) in PyTorch, for one text and a config without nesting."""

    def __init__(self, folder: Path, config: Mapping[str, Any], embeddings: Tensor) -> None:
        self.weights = {
            name.replace("midlayer.", "layers.0."): weight
            for name, weight in load_file(folder / "model.safetensors").items()
        }
        self.config, self.embeddings = config, self.weights.get("embed_tokens.weight", embeddings)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-6)

    def states(self, streams: Tensor) -> Tensor:
        """Return the projection of streams [num_tokens, 3, hidden]."""
        joined = streams.flatten(1)
        if self.config.get("norm_before_fc"):
            joined = self.norm("input_norm", joined)
        if self.config.get("fc_norm"):
            joined = torch.cat([self.norm(f"fc_norm.{i}", each) for i, each in enumerate(joined.chunk(3, 1))], 1)
        return linear(joined, self.weights["fc.weight"])

    def __call__(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the next draft reads, and the logits of the target's tokens."""
        embedded, residual = self.norm("layers.0.input_layernorm", self.embeddings[tokens]), states
        normed = self.norm("layers.0.hidden_norm", states)
        if self.config.get("norm_before_residual"):
            residual = normed
        x = torch.cat([embedded, normed], dim=1)
        for layer in range(int(self.config["num_hidden_layers"])):
            stem = f"layers.{layer}."
            if layer:
                x = self.norm(f"{stem}input_layernorm", residual)
            residual = residual + self.attention(f"{stem}self_attn.", x)
            x = self.norm(f"{stem}post_attention_layernorm", residual)
            gate, up = (linear(x, self.weights[f"{stem}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            residual = residual + linear(silu(gate) * up, self.weights[f"{stem}mlp.down_proj.weight"])
        normed = self.norm("norm", residual)
        own, offsets = linear(normed, self.weights["lm_head.weight"]), self.weights.get("d2t")
        logits = torch.full((len(tokens), VOCAB_SIZE), -torch.inf)
        logits[:, torch.arange(own.shape[1]) + (0 if offsets is None else offsets)] = own
        return normed if self.config.get("norm_output") else residual, logits

    def attention(self, stem: str, x: Tensor) -> Tensor:
        num_tokens, half = len(x), int(self.config["head_dim"]) // 2
        angles = torch.outer(torch.arange(num_tokens), 10_000.0 ** -(torch.arange(half) / half)).repeat(1, 2)[:, None]

        def heads(name: str) -> Tensor:
            return linear(x, self.weights[f"{stem}{name}_proj.weight"]).view(num_tokens, -1, 2 * half)

        def rotated(name: str) -> Tensor:
            found = heads(name)
            if f"{stem}{name}_norm.weight" in self.weights:
                found = self.norm(f"{stem}{name}_norm", found)
            turned = torch.cat([-found[..., half:], found[..., :half]], dim=-1)
            return (found * angles.cos() + turned * angles.sin()).transpose(0, 1)

        attended = scaled_dot_product_attention(
            rotated("q"), rotated("k"), heads("v").transpose(0, 1), is_causal=True, enable_gqa=True
        )
        return linear(attended.transpose(0, 1).flatten(1), self.weights[f"{stem}o_proj.weight"])


@pytest.mark.parametrize("kernels", ["torch", "cpp"] if usable_isas() else ["torch"])
@pytest.mark.parametrize(("name", "changes"), [
    ("llama", {}), ("qwen3", {}),
    ("llama", {"num_hidden_layers": 2, "norm_before_fc": True, "draft_vocab_size": None}),
    ("gemma2", {}),
], ids=str)  # fmt: skip
def test_logits_are_those_of_vllm(tmp_path: Path, name: str, changes: Config, kernels: str) -> None:
    """Compare 40 tokens and, of the drafts behind, what a second pass reads; the first token has zeros before it."""
    back_end, (config, names) = choose_back_end("cpu", kernels), HEADS[name]
    folder = write_random_head(tmp_path / "head", config | changes, *(() if changes else names))
    target = write_random_folder(tmp_path / "target", TARGETS[name])
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(_typed(target, name), attn_implementation="eager")
    tokens, flat = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(2)), config | changes
    flat |= flat.get("transformer_layer_config", {})  # type: ignore[arg-type]

    decoder = load_model(target, dtype="float32", back_end=back_end)
    source = read_eagle(folder)
    spec = fitted(source.spec, decoder.spec)
    assert spec.eagle is not None
    checkpoint = source.open_tensors(UNQUANTIZED).checkpoint
    head = EagleHead(decoder, spec, WeightReader(checkpoint, spec.weights, back_end, "float32", "cpu"), "auto", 256)
    decoder.tap_layers(spec.eagle.taps)
    places = np.arange(40)
    batch = ForwardBatch(
        tokens.numpy(), places, places, np.array([0, 40], np.int32), np.array([40], np.int32),
        np.arange(3, dtype=np.int32)[None],
    ).taken(back_end.library)  # fmt: skip
    each = replace(  # a sequence for each token, on the same blocks
        batch, query_starts=back_end.library.tensor(np.arange(41, dtype=np.int32)),
        context_lens=back_end.library.tensor(np.arange(1, 41, dtype=np.int32)),
        block_tables=back_end.library.tensor(np.arange(3, dtype=np.int32)[None].repeat(40, axis=0)),
    )  # fmt: skip
    hidden = decoder.forward(batch, KVCache.allocate(decoder.kv_geometry, 3, 16, back_end))
    with torch.no_grad():
        whole = model(tokens[None], output_hidden_states=True)
        torch.testing.assert_close(torch.from_numpy(floats(decoder.logits(hidden))), whole.logits[0], rtol=0, atol=1e-4)
        reference = Reference(folder, flat, model.get_input_embeddings().weight)
        states = reference.states(torch.stack([whole.hidden_states[tap][0] for tap in spec.eagle.taps], dim=1))
    own = torch.from_numpy(floats(head.states(hidden)))
    torch.testing.assert_close(own, states, rtol=0, atol=1e-4)
    cache = KVCache.allocate(head.kv_geometry, 3, 16, back_end)
    for _ in range(2):
        before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
        given = back_end.library.tensor(torch.cat([torch.zeros_like(own[:1]), own[:-1]]).numpy())
        with torch.no_grad():
            states, expected = reference(tokens, before)
        last = floats(head.forward(replace(batch, hidden=take_rows(given, places)), cache, np.arange(1)))
        output = head.forward(replace(each, hidden=given), cache, places)
        if kernels == "cpp":
            np.testing.assert_array_equal(last[0], floats(output)[-1])
        own, found = torch.from_numpy(floats(output).copy()), torch.from_numpy(floats(head.logits(output)))
        torch.testing.assert_close(own, states, rtol=0, atol=1e-4)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def _typed(folder: Path, name: str) -> Path:
    """Return the folder of a model with the type that transformers asks for."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": name}))
    return folder


# --- what is loaded, and how much memory that takes -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), [
    ("llama", {}), ("llama", {"quantization": "int8"}), ("qwen3", {"dtype": "bfloat16"}),
])  # fmt: skip
def test_plan_with_a_head_is_what_the_engine_reports(
    folders_of: Callable[[str], tuple[Path, Path]], name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = folders_of(name)
    options = EngineOptions(
        str(target), max_num_seqs=20, max_num_batched_tokens=32, spec_method="eagle3", spec_model=str(head), **settings
    )
    model = read_model(options.model, options.dtype, options.quantization_options)
    draft, memory_bytes = read_draft_model(model, options), 100 * 2**20
    plan = plan_memory(model, Hardware("this machine", memory_bytes, 1.0, 1.0, device="cpu"), options, draft=draft)
    taken = plan.weight_bytes + plan.draft_weight_bytes
    monkeypatch.setattr("quire.execution.device.free_memory_bytes", lambda: memory_bytes - taken)
    both = assemble(options, loads_tokenizer=False)
    if both.model.back_end.name != "cpp":
        pytest.skip("the C++ kernels were not built")
    assert plan.draft_name == "EAGLE-3 head"
    assert taken == both.ready.weights_bytes
    assert plan.kv_bytes_per_token == both.ready.kv_bytes_per_token
    assert plan.cache.num_blocks == pytest.approx(both.ready.limits.num_blocks, rel=0.03)


def test_copy_of_the_model_s_embeddings_takes_no_memory(
    tmp_path: Path, folders_of: Callable[[str], tuple[Path, Path]]
) -> None:
    target, head = folders_of("llama")
    table, found = load_file(target / "model.safetensors")["model.embed_tokens.weight"], list[int]()
    for own in ({}, {"embed_tokens.weight": table}, {"embed_tokens.weight": table + 1}):
        folder = write_folder(tmp_path / str(len(found)), PLAIN, {})
        save_file(load_file(head / "model.safetensors") | own, folder / "model.safetensors")
        options = EngineOptions(str(target), num_kv_blocks=20, spec_method="eagle3", spec_model=str(folder))
        found.append(assemble(options, loads_tokenizer=False).ready.weights_bytes)
    assert found == [found[0], found[0], found[0] + table.nbytes]


def test_layers_of_configs() -> None:
    """vLLM's ids are of layers that read a stream, those for SGLang, in eagle_config, of layers that give it."""
    def taps(**config: object) -> tuple[int, ...]:
        eagle = eagle_spec(ConfigReader(PLAIN | config, "head")).eagle
        assert eagle is not None
        return eagle.taps

    ids = {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
    assert taps() == ()
    assert taps(**ids) == (1, 4, 7)
    assert taps(eagle_config=ids) == (2, 5, 8)
    assert taps(eagle_config={"layer_ids": [3, 4, 5]}) == (3, 4, 5)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "told"), [
    ({"hidden_size": 64}, "64 columns (target_hidden_size, or hidden_size), those of the model have 48"),
    ({"hidden_size": 64, "target_hidden_size": 48}, "those of the model have 48 columns, not its 64"),
    ({"vocab_size": 95}, "its vocabulary has 95 tokens, that of the model 96"),
    ({"draft_vocab_size": 97}, "draft_vocab_size is 97, more than the 96 of the model"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}, "streams in front of layers 1, 4, 9, and the model has 8 layers"),
    ({"eagle_aux_hidden_state_layer_ids": [4, 1, 2]}, "layers from 0 to 4096 in ascending order, got [4, 1, 2]"),
    ({"num_aux_hidden_states": 4}, "layers 2, 4, 5, which are those of a head of 4 streams without eagle_aux"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 3}, "is 3, but eagle_aux_hidden_state"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not supported yet"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "V2ForCausalLM' is no EAGLE-3 head that is read"),
    ({"logit_scale": 0.5}, "logit_scale = 0.5 is not supported yet"),
    ({"quantization_config": {"quant_method": "fp8"}}, "only heads of floating-point weights are read"),
    ({"head_dim": 12}, "its heads of 12 need the back end torch"),
    ({"head_dim": 24}, "self_attn.q_proj.weight has shape [64, 96], expected [96, 96]"),
    (SPECULATOR | {"speculators_model_type": "peagle"}, "speculators_model_type 'peagle' is not supported yet"),
], ids=str)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, folders_of: Callable[[str], tuple[Path, Path]], changes: Config, told: str
) -> None:
    target, head = folders_of("llama")
    weights = load_file(head / "model.safetensors")
    weights = {name: each for name, each in weights.items() if not name.endswith("2t")}
    folder = write_folder(tmp_path, PLAIN | changes, weights)
    if "back end" in told and not usable_isas():
        pytest.skip("the C++ kernels were not built")
    with pytest.raises((ConfigError, ModelError), match=re.escape(told)) as raised:
        LLM(target, speculative_config=drafts_of(folder))
    assert f"speculative_config: EAGLE-3 head '{folder}'" in str(raised.value)


def test_plan_names_a_head_that_does_not_fit(tmp_path: Path, folders_of: Callable[[str], tuple[Path, Path]]) -> None:
    folder, model = write_folder(tmp_path, PLAIN | {"vocab_size": 95}, {}), read_model(str(folders_of("llama")[0]))
    options = EngineOptions(spec_method="eagle3", spec_model=str(folder))
    told = f"speculative_config: EAGLE-3 head '{folder}': its vocabulary has 95 tokens, that of the model 96"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        read_draft_model(model, options)


def test_settings_and_tokens_that_a_head_does_not_have_are_refused(
    tmp_path: Path, folders_of: Callable[[str], tuple[Path, Path]]
) -> None:
    target, head = folders_of("llama")
    with pytest.raises(ModelError, match="an EAGLE-3 head drafts for a model; give it with that"):
        LLM(head)
    weights = load_file(head / "model.safetensors")
    weights["d2t"][7] = 90
    folder = write_folder(tmp_path, PLAIN, {})
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match="token 7 of the head is token 97 of the model, which has 96 tokens"):
        LLM(target, speculative_config=drafts_of(folder))
