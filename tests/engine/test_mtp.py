"""MTP heads: they change no bit, read the tokens and the hidden states that they were trained on, and are planned."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, ModelError
from quire.core.speculation import SpeculationConfig
from quire.engine.assembly import assemble
from quire.engine.draft_model_loading import load_mtp_head
from quire.engine.loading import kv_identity, load
from quire.engine.options import EngineOptions
from quire.extension.isas import usable_isas
from quire.kernels.choice import choose_back_end
from quire.kernels.tensors import floats
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import load_model
from quire.model.mtp import MtpHead
from quire.model.packed_weights import weights_digest
from quire.model.quantization import UNQUANTIZED
from quire.model.source import read_folder
from quire.model.weights import WeightReader
from quire_lab.sim.footprint import weight_bytes
from quire_lab.sim.hardware import Hardware
from quire_lab.sim.models import read_draft_model, read_model
from quire_lab.sim.planning import plan_memory
from support.answers import Answer, answers_of
from support.every_way import CASES, ISAS, VOCAB_SIZE, asked, check_all_at_once
from support.faults import raising
from support.gguf_blocks import random_blocks
from support.gguf_files import Quantize, as_is, convert, converted, latent_metadata, write_gguf
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
from support.random_folder import write_random_folder

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no MTP heads yet"),
    pytest.mark.usefixtures("no_failure"),
]

COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
DELTA: dict[str, object] = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "full_attention_interval": 2,
}  # fmt: skip
ROUTED: dict[str, object] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN = COMMON | DELTA | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
CONFIGS: dict[str, dict[str, object]] = {
    "qwen3.5": QWEN,
    "qwen3.5 moe": QWEN | {
        "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "qwen3-next": COMMON | DELTA | {
        "architectures": ["Qwen3NextForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "glm4 moe": COMMON | ROUTED | {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 16},
    "glm4 moe, plain kernels": COMMON | ROUTED | {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 12},
    "deepseek v3": COMMON | ROUTED | {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip
NEMOTRON: dict[str, object] = COMMON | {
    "architectures": ["NemotronHForCausalLM"], "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "num_hidden_layers": 3, "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2,
    "ssm_state_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 24, "num_nextn_predict_layers": 1,
}  # fmt: skip
CONFIGS["nemotron 3 super"] = NEMOTRON
MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a random model of a family once."""
    written = dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = write_random_folder(tmp_path_factory.mktemp("mtp"), CONFIGS[name])
        return written[name]

    return folder


# --- no bit changes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("isa", "dtype", "mode"), [
    (*case, ("swap", "recompute")[place % 2]) for place, case in enumerate(CASES)
])  # fmt: skip
@pytest.mark.usefixtures("drafts")
def test_every_way_of_serving_a_hybrid_has_the_bits_of_a_plain_run(
    folder_of: Callable[[str], Path], isa: str, dtype: str, mode: str
) -> None:
    """Hits, rejected drafts, preemptions, chunks and forks, with NaN in all that is free; drafts are the same, too."""
    stats, _ = check_all_at_once(folder_of("qwen3.5"), isa, dtype, mode, "mtp", num_state_slots=30)
    assert stats.states["used_slots"] == 0


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3.5"])
def test_every_way_of_serving_other_families_has_the_bits_of_a_plain_run(
    folder_of: Callable[[str], Path], name: str
) -> None:
    settings = {"num_state_slots": 30} if name.startswith(("qwen", "nemotron")) else {}
    isa = "auto" if "plain" in name else ISAS[0]  # PyTorch computes heads of 12 dimensions
    check_all_at_once(folder_of(name), isa, "bfloat16", "recompute", "mtp", **settings)


def test_every_way_of_serving_latents_in_8_bits_has_the_bits_of_a_plain_run(folder_of: Callable[[str], Path]) -> None:
    kv_dtype = "int8_per_token_head"
    check_all_at_once(folder_of("deepseek v3"), ISAS[0], "bfloat16", "swap", "mtp", kv_cache_dtype=kv_dtype)


@pytest.mark.parametrize("settings", [
    {"quantization": "int8"},
    {"quantization": "int4", "quantization_group_size": 32},
    {"kv_cache_dtype": "int8_per_token_head"},
    {"dtype": "float16", "enable_prefix_caching": False},
    {"data_parallel_size": 2},
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("as_many_as_possible", "forked_processes")
def test_answers_with_the_head_s_own_drafts(folder_of: Callable[[str], Path], settings: dict[str, Any]) -> None:
    prompts, params = asked()
    model = folder_of("qwen3.5")
    expected = answers(model, params, prompts, **settings)
    assert answers(model, params, prompts, speculative_config=MTP, **settings) == expected


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize(("name", "num_ranks", "mode"), [
    ("qwen3.5", 3, "gather"), ("glm4 moe", 4, "gather"), ("deepseek v3", 2, "reduce"),
])  # fmt: skip
@pytest.mark.usefixtures("as_many_as_possible", "drafts", "forked_processes")
def test_ranks_have_the_bits_and_drafts_of_one_process(
    folder_of: Callable[[str], Path], name: str, num_ranks: int, mode: str
) -> None:
    """Ranks that reduce have bits of their own; these are compared with those of the same ranks without drafts.

    Behind hits inside of blocks, which models without states have, drafts would differ.
    """
    prompts, params = asked()
    caching = {"enable_prefix_caching": name == "qwen3.5"}
    settings = caching | {"tensor_parallel_size": num_ranks, "tensor_parallel_mode": mode}
    alone = caching | {"speculative_config": MTP} if mode == "gather" else settings
    expected = answers(folder_of(name), params, prompts, **alone)
    assert answers(folder_of(name), params, prompts, speculative_config=MTP, **settings) == expected


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("forked_processes")
def test_head_that_fails_beside_ranks_fails_the_step_alone(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(folder_of("glm4 moe"), tensor_parallel_size=2, speculative_config=MTP, num_kv_blocks=20) as llm:
        (expected,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        with monkeypatch.context() as patch:
            patch.setattr(MtpHead, "forward", raising(ArithmeticError))
            with pytest.raises(ArithmeticError):
                llm.generate([[5, 6, 7]], params, use_tqdm=False)
        (found,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert answers_of(found) == answers_of(expected)


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("name", ["glm4 moe", "qwen3.5"])
@pytest.mark.usefixtures("as_many_as_possible", "drafts", "tests_frozen")
def test_blocks_of_a_disk_and_sessions_and_sleep_keep_answers_and_drafts(
    folder_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Prompts have one token behind whole blocks, so that hits end there."""
    rng, (model, params) = random.Random(3), (folder_of(name), SamplingParams(max_tokens=20, temperature=0.0))
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (17, 25, 33, 41)]
    expected = str(answers(model, [params] * 4, prompts, enable_prefix_caching=False))
    disk = {"kv_disk_dir": str(tmp_path), "kv_disk_size": "64MiB", "block_size": 8}
    for settings in (disk, disk, {"enable_sleep_mode": True, "block_size": 8}):
        with LLM(model, speculative_config=MTP, max_model_len=160, max_num_batched_tokens=23, **settings) as llm:
            found = list[list[Answer]]()
            for _ in range(2):
                found += [answers_of(output) for output in llm.generate(prompts, params, use_tqdm=False)]
                if "enable_sleep_mode" in settings:
                    llm.sleep(level=2)
                    llm.wake_up()
            if settings is disk and not llm.saved_sessions():
                llm.create_session({"prompt_token_ids": prompts[3][:-1]}).save("one")
        assert str(found) == expected
    with LLM(model, speculative_config=MTP, max_model_len=160, **disk | {"kv_disk_write_policy": "reused"}) as llm:
        (output,) = llm.generate([llm.restore_session("one").prompt(prompts[3][-1:])], params, use_tqdm=False)
        assert output.metrics.num_cached_tokens == 40
        assert str([answers_of(output)] * 2) == str(found[3::4])


@pytest.mark.parametrize("fault", [no_tails, tails_of_rejected_drafts])
@pytest.mark.usefixtures("drafts")
def test_other_hidden_states_before_a_step_would_show(
    folder_of: Callable[[str], Path], fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="other drafts behind"):
        check_all_at_once(folder_of("qwen3.5"), ISAS[0], "bfloat16", "swap", "mtp", num_state_slots=30)


# --- tokens and hidden states are those of training -------------------------------------------------------------------


def write_oracle(folder: Path, reads: str) -> Path:
    """Write a model that continues each token by `following`, and a head that reads one of its two inputs alone.

    No layer adds anything to an embedding, and each embedding is a unit vector. The head passes on the embedding of a
    token, or permutes a hidden state so that it is that of the next token: both draft rightly if the input is right.
    """
    write_random_folder(folder, QWEN | {"hidden_size": VOCAB_SIZE})
    weights, units = load_file(folder / "model.safetensors"), torch.eye(VOCAB_SIZE)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "norm.weight")) or "norm_" in name:
            weight.zero_()   # norms multiply by 1 + weight
    permuted = torch.zeros_like(units)
    permuted[[following(token) for token in range(VOCAB_SIZE)], list(range(VOCAB_SIZE))] = 1
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = units, permuted
    zeros = torch.zeros_like(units)
    parts = [units, zeros] if reads == "embedding" else [zeros, permuted]
    weights["mtp.fc.weight"] = torch.cat(parts, dim=1).contiguous()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("reads", ["embedding", "hidden state"])
@pytest.mark.usefixtures("as_many_as_possible")
def test_heads_that_know_the_next_token_are_always_right(
    tmp_path: Path, reads: str, acceptance: Acceptance  # noqa: F811
) -> None:
    """Also for the first draft of each request, of several in a row, behind hits, chunks, forks and preemptions."""
    folder = write_oracle(tmp_path / "model", reads)
    preempted = {"num_kv_blocks": 34, "preemption_mode": "swap", "num_swap_blocks": 60}
    for settings in ({}, preempted, {"num_kv_blocks": 34, "preemption_mode": "recompute"}):
        ask_oracle(folder, speculative_config=MTP, **settings)
    assert acceptance.num_accepted == acceptance.num_drafted > 500


@pytest.mark.parametrize(("reads", "fault"), [
    ("embedding", shifted_tokens), ("hidden state", shifted_states),
])  # fmt: skip
@pytest.mark.usefixtures("as_many_as_possible")
def test_a_shift_by_one_would_show(
    tmp_path: Path, reads: str, fault: Callable[[pytest.MonkeyPatch], None], acceptance: Acceptance,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = write_oracle(tmp_path / "model", reads)
    fault(monkeypatch)
    ask_oracle(folder, speculative_config=MTP)
    assert acceptance.num_accepted < 0.9 * acceptance.num_drafted


# --- the head's logits are those of transformers ----------------------------------------------------------------------

LATER_LAYER = {"mtp_block.": "", "post_norm": "shared_head.norm"}
TRANSFORMERS: dict[str, tuple[str, dict[str, object], str, dict[str, str]]] = {
    "deepseek v3": ("DeepseekV3", {}, "model.layers.2.", LATER_LAYER),
    "glm4 moe": ("Glm4Moe", {"use_qk_norm": True}, "model.layers.2.", LATER_LAYER),
    "qwen3.5": ("Qwen3_5Text", {}, "mtp.", {
        "mtp_block.": "layers.0.", "post_norm": "norm", "eh_proj": "fc", "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
    }),
}  # fmt: skip


@pytest.mark.parametrize("kernels", ["torch", "cpp"] if usable_isas() else ["torch"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    """Compare the logits of 40 tokens; both read zeros for the hidden state before the first one."""
    transformers = pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    family, options, stem, names = TRANSFORMERS[name]
    sizes = {key: value for key, value in CONFIGS[name].items() if key not in ("architectures", "model_type")}
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    main = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    base = main.model
    kind, norm = type(base.layers[-1]), type(base.norm)
    head = layers.MtpLayer(config, kind, norm, len(base.layers) - 1).eval()
    with torch.no_grad():
        for parameter in [*main.parameters(), *head.parameters()]:
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)  # experts are not initialized
    main.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for key, value in head.state_dict().items():
        for old, new in names.items():
            key = key.replace(old, new)  # noqa: PLW2901
        weights[stem + key] = value.clone().contiguous()
    save_file(weights, tmp_path / "model.safetensors")

    tokens = torch.randint(VOCAB_SIZE, (1, 40))
    with torch.no_grad():
        hidden = base(tokens).last_hidden_state
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        positions = torch.arange(40)[None]
        mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
        normed = head(
            base.embed_tokens(tokens), before, base.rotary_emb(before, positions), mask, positions, None
        )
        expected = main.lm_head(normed)[0].log_softmax(dim=-1)
    assert_logits(tmp_path, kernels, tokens, before, expected)


@pytest.mark.parametrize("kernels", ["torch", "cpp"] if usable_isas() else ["torch"])
def test_logits_of_nemotron_are_those_of_transformers_layers(tmp_path: Path, kernels: str) -> None:
    """transformers has none of its MTP head, which is two layers behind a projection, and a norm (as in vLLM)."""
    transformers = pytest.importorskip("transformers")
    config = {key: value for key, value in NEMOTRON.items() if key != "architectures"}
    torch.manual_seed(1)
    main, head = (
        transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**config | {"layers_block_type": kinds})).eval()
        for kinds in (NEMOTRON["layers_block_type"], ["full_attention", "moe"])
    )
    width = main.config.hidden_size
    project = torch.nn.Linear(2 * width, width, bias=False)
    norms = [type(head.model.norm_f)(width, head.config.layer_norm_epsilon) for _ in range(2)]
    with torch.no_grad():
        for parameter in [each for module in (main, head, project, *norms) for each in module.parameters()]:
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    main.save_pretrained(tmp_path)
    head.save_pretrained(tmp_path / "head")
    weights, found = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "head/model.safetensors")
    for key, value in found.items():
        stem = key.partition(".layers.")[2]
        weights |= {f"mtp.layers.{stem}": value} if stem else {}
    weights |= {
        "mtp.layers.0.eh_proj.weight": project.weight.detach(), "mtp.layers.0.enorm.weight": norms[0].weight.detach(),
        "mtp.layers.0.hnorm.weight": norms[1].weight.detach(),
        "mtp.layers.1.final_layernorm.weight": head.model.norm_f.weight.detach().clone(),
    }  # fmt: skip
    save_file(weights, tmp_path / "model.safetensors")
    tokens = torch.randint(VOCAB_SIZE, (1, 40))
    with torch.no_grad():
        hidden = main.model(tokens).last_hidden_state
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        embedded = main.get_input_embeddings()(tokens)
        both = torch.cat([norms[0](embedded), norms[1](before)], dim=-1)
        normed = head.model(inputs_embeds=project(both)).last_hidden_state
        expected = main.lm_head(normed)[0].log_softmax(dim=-1)
    assert_logits(tmp_path, kernels, tokens, before, expected)


def assert_logits(folder: Path, kernels: str, tokens: Tensor, before: Tensor, expected: Tensor) -> None:
    """Compare a head's logits [num_tokens, vocab_size] of tokens and the hidden states before each."""
    back_end, positions = choose_back_end("cpu", kernels), torch.arange(40)[None]
    decoder = load_model(folder, dtype="float32", back_end=back_end)
    checkpoint = read_folder(folder).open_tensors(UNQUANTIZED).checkpoint
    assert decoder.spec.mtp is not None
    own = MtpHead(decoder, WeightReader(checkpoint, decoder.spec.mtp.weights, back_end, "float32", "cpu"), "auto")
    whole = ForwardBatch(
        tokens[0].numpy(), positions[0].numpy(), positions[0].numpy(), np.array([0, 40], np.int32),
        np.array([40], np.int32), np.arange(3, dtype=np.int32)[None],
        hidden=back_end.library.tensor(before[0].numpy()),
    )  # fmt: skip
    cache = KVCache.allocate(own.kv_geometry, 3, 16, back_end)
    last = floats(own.forward(whole.taken(back_end.library), cache, np.arange(1)))
    each = replace(  # a sequence for each token, on the same blocks
        whole, query_starts=np.arange(41, dtype=np.int32), context_lens=np.arange(1, 41, dtype=np.int32),
        block_tables=whole.block_tables.repeat(40, axis=0),
    )  # fmt: skip
    hidden = own.forward(each.taken(back_end.library), cache, np.arange(40))
    if kernels == "cpp":
        np.testing.assert_array_equal(last[0], floats(hidden)[-1])
    found = torch.from_numpy(floats(own.logits(hidden))).log_softmax(dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# --- heads of GGUF files ----------------------------------------------------------------------------------------------


WIDTHS: dict[str, object] = {"hidden_size": 64, "rms_norm_eps": 1e-6}
HYBRID = WIDTHS | {
    "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"},
}  # fmt: skip
FLOATS = "ssm_alpha.weight", "attn_k_b.weight"  # rows of fewer elements than a block
LATER = {"block_count": 3, "nextn_predict_layers": 1}
FILES: dict[str, tuple[str, dict[str, object], dict[str, Any]]] = {  # architecture, config, and metadata
    "qwen3.5": ("qwen35", HYBRID, {"attention.recurrent_layers": [True, False, False]}),
    "qwen3.5 moe": ("qwen35moe", HYBRID, {"attention.recurrent_layers": [True, False, False]}),
    "qwen3-next": ("qwen3next", HYBRID, {"attention.recurrent_layers": [True, False, False]}),
    "glm4 moe": ("glm4moe", WIDTHS | {"partial_rotary_factor": 0.5}, {}),
    "deepseek v3": ("deepseek2", WIDTHS | {"rope_interleave": True, "q_lora_rank": 32}, {"expert_gating_func": 2}),
}


def write_file(folder: Path, name: str, quantize: Quantize = as_is) -> tuple[Path, Path]:
    """Write a random folder, and a GGUF file of it with the head; return both."""
    architecture, sizes, metadata = FILES[name]
    config = CONFIGS[name] | sizes
    write_random_folder(folder, config, torch.bfloat16)
    changes = {f"{architecture}.{key}": value for key, value in (LATER | metadata).items()}
    changes |= latent_metadata(config, is_split=True) if architecture == "deepseek2" else {}
    return folder, convert(folder, folder.with_suffix(".gguf"), quantize, **changes)


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("name", FILES)
def test_head_of_a_file_is_that_of_the_folder(tmp_path: Path, name: str) -> None:
    digests, config = [], SpeculationConfig("mtp")
    for path in write_file(tmp_path / "model", name):
        options = EngineOptions(str(path), num_kv_blocks=20)
        digests.append(weights_digest(load_mtp_head(options, config, load(options, path), path).model))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", ["qwen3.5", "glm4 moe", "deepseek v3"])
@pytest.mark.usefixtures("as_many_as_possible")
def test_answers_of_a_file_with_its_head_s_drafts(
    tmp_path: Path, name: str, acceptance: Acceptance  # noqa: F811
) -> None:
    """Blocks of 8 bits are alike in both runs, and in the plan of the memory."""
    prompts, params = asked()
    _, file = write_file(tmp_path / "model", name, random_blocks(dict.fromkeys(FLOATS, "BF16"), "Q8_0"))
    expected = answers(file, params, prompts)
    assert answers(file, params, prompts, speculative_config=MTP) == expected
    assert acceptance.num_drafted
    options = EngineOptions(str(file), num_kv_blocks=20, spec_method="mtp")
    both, model = assemble(options, loads_tokenizer=False), read_model(str(file))
    draft = read_draft_model(model, options)
    assert draft is not None
    if both.model.back_end.name == "cpp":
        planned = [weight_bytes(each.spec, each.dtype, quantization=each.quantization) for each in (model, draft)]
        assert sum(planned) == both.ready.weights_bytes


def test_a_file_without_the_head_is_refused(tmp_path: Path) -> None:
    folder, _ = write_file(tmp_path / "model", "glm4 moe")
    metadata, tensors = converted(folder, **{f"glm4moe.{key}": value for key, value in LATER.items()})
    assert [name for name in tensors if name.startswith("blk.2.nextn.")]
    left = {name: each for name, each in tensors.items() if not name.startswith("blk.2.nextn.eh_proj")}
    file = write_gguf(tmp_path / "without.gguf", metadata, left)
    with pytest.raises(ConfigError, match="or the block behind the last layer of a GGUF file has nextn tensors"):
        LLM(file, speculative_config=MTP)


# --- what is loaded, and how much memory that takes -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), [
    ("qwen3.5", {}), ("qwen3.5", {"quantization": "int8"}), ("qwen3-next", {}), ("glm4 moe", {}),
    ("deepseek v3", {"dtype": "bfloat16"}),
])  # fmt: skip
def test_plan_with_a_head_is_what_the_engine_reports(
    folder_of: Callable[[str], Path], name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(
        str(folder_of(name)), max_num_seqs=20, max_num_batched_tokens=32, spec_method="mtp", **settings
    )
    model = read_model(options.model, options.dtype, options.quantization_options)
    draft, memory_bytes = read_draft_model(model, options), 100 * 2**20
    plan = plan_memory(model, Hardware("this machine", memory_bytes, 1.0, 1.0, device="cpu"), options, draft=draft)
    taken = plan.weight_bytes + plan.draft_weight_bytes
    monkeypatch.setattr("quire.execution.device.free_memory_bytes", lambda: memory_bytes - taken)
    both = assemble(options, loads_tokenizer=False)
    if both.model.back_end.name != "cpp":
        pytest.skip("the C++ kernels were not built")
    assert plan.draft_name == "MTP head"
    assert taken == both.ready.weights_bytes
    assert plan.kv_bytes_per_token == both.ready.kv_bytes_per_token
    assert plan.cache.num_blocks == pytest.approx(both.ready.limits.num_blocks, rel=0.03)
    alone = assemble(replace(options, spec_method=None), loads_tokenizer=False)
    assert alone.ready.weights_bytes == plan.weight_bytes
    assert alone.ready.kv_bytes_per_token < both.ready.kv_bytes_per_token


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
def test_identity_of_keys_and_values_has_the_head(folder_of: Callable[[str], Path]) -> None:
    """Blocks with keys of a head are no blocks of an engine without, and a changed head is another one."""
    model, found = folder_of("glm4 moe"), set[str]()
    for change in (None, 0.0, 0.5):
        options = EngineOptions(str(model), spec_method=None if change is None else "mtp", num_kv_blocks=20)
        loaded = assemble(options, loads_tokenizer=False)
        compute = loaded.engine.executor.worker.compute  # type: ignore[attr-defined]
        head = None if change is None else compute.drafter._method._model
        if change:
            next(each for each in head.kept_weights if isinstance(each, np.ndarray))[:1] = change
        found.add(kv_identity(options, loaded.loaded, compute.cache, head).draft)
    assert len(found) == 3
    assert "" in found


# --- what is refused --------------------------------------------------------------------------------------------------


def changed(folder: Path, source: Path, change: Callable[[dict[str, Tensor]], None], **config: object) -> Path:
    """Write a model folder with changed tensors and keys of its config."""
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    return folder


def nothing(_: dict[str, Tensor]) -> None:
    """Change no tensor."""


def without_head(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if name.startswith("mtp.") or ".layers.2." in name]:
        del weights[name]


def narrow(weights: dict[str, Tensor]) -> None:
    weights["mtp.fc.weight"] = weights["mtp.fc.weight"][:, :48].contiguous()


@pytest.mark.parametrize(("name", "change", "config", "told"), [
    ("qwen3.5", without_head, {}, r"the MTP head of .*: .*tensor mtp\.pre_fc_norm_embedding\.weight is missing"),
    ("qwen3.5", nothing, {"mtp_num_hidden_layers": 0}, "has no MTP head that is read: those of Qwen3-Next"),
    ("qwen3.5", narrow, {}, r"tensor mtp\.fc\.weight has shape \[48, 48\], expected \[48, 96\]"),
    ("glm4 moe", nothing, {"num_nextn_predict_layers": 0}, "where num_nextn_predict_layers or mtp_num_hidden_layers"),
    ("glm4 moe", without_head, {}, r"tensor model\.layers\.2\.enorm\.weight is missing"),
    ("qwen3.5", nothing, {"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers must be an integer from 0"),
])  # fmt: skip
def test_heads_that_are_not_there_or_of_other_sizes_are_refused(
    tmp_path: Path, folder_of: Callable[[str], Path], name: str, change: Callable[[dict[str, Tensor]], None],
    config: dict[str, object], told: str,
) -> None:  # fmt: skip
    folder = changed(tmp_path, folder_of(name), change, **config)
    with pytest.raises((ConfigError, ModelError), match=told):
        LLM(folder, speculative_config=MTP)
    if "mtp_num_hidden_layers" not in told[:30]:
        LLM(folder, num_kv_blocks=20).close()  # without drafts the head is not looked at


def test_settings_that_a_head_does_not_have_are_refused(folder_of: Callable[[str], Path], demo_model: Path) -> None:
    with pytest.raises(ConfigError, match="has no MTP head that is read"):
        LLM(demo_model, speculative_config=MTP)
    options, config = EngineOptions(str(folder_of("qwen3.5"))), SpeculationConfig("mtp")
    target = load(options, folder_of("qwen3.5"))
    target.model.device = torch.device("cuda")
    with pytest.raises(ConfigError, match="the method mtp is not supported on device cuda yet"):
        load_mtp_head(options, config, target, folder_of("qwen3.5"))
