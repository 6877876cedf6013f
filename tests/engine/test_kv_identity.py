"""Each byte of a model and each setting that changes keys and values changes their identity, and nothing else."""

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ConfigError
from quire.core.kv_identity import KV_EPOCH, KVIdentity
from quire.engine.loading import LoadedModel, kv_identity, load
from quire.engine.options import EngineOptions
from quire.extension.isas import usable_isas
from quire.kernels.choice import choose_back_end
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

SIZES = {"vocab_size": 320, "max_position_embeddings": 128}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], **SIZES, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
}  # fmt: skip
# Kernels that the demo model does not use: layer norms, biases, learned positions; windows, softcaps, GELU; experts.
OTHERS: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "architectures": ["GPT2LMHeadModel"], **SIZES, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4,
    },
    "Gemma 2": {
        **LLAMA, "architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "sliding_window": 32,
        "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "Qwen 2 MoE": {
        **LLAMA, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip
NUM_TOKENS = 48


def loaded_model(folder: Path, **settings: object) -> tuple[EngineOptions, LoadedModel, KVCache]:
    options = EngineOptions(model=str(folder), **({"max_model_len": 128, "num_kv_blocks": 8} | settings))  # type: ignore[arg-type]
    loaded = load(options, folder)
    geometry, back_end = loaded.model.kv_geometry, loaded.model.back_end
    return options, loaded, KVCache.allocate(geometry, 8, options.block_size, back_end)


def identity(folder: Path, **settings: object) -> KVIdentity:
    return kv_identity(*loaded_model(folder, **settings))


def differing(left: KVIdentity, right: KVIdentity) -> set[str]:
    return {each.name for each in fields(KVIdentity) if getattr(left, each.name) != getattr(right, each.name)}


@pytest.fixture(autouse=True)
def isa_of_other_tests() -> Iterator[None]:
    """Restore the instruction set, which is one for the whole process."""
    yield
    choose_back_end("cpu")


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model, tmp_path / "model"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a folder with a config alone."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "small"


def changed(folder: Path, **fields: object) -> Path:
    """Change fields of a folder's config."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def test_two_loads_are_equal_whatever_does_not_change_keys_and_values(demo_model: Path, folder: Path) -> None:
    first = identity(demo_model)
    for settings in ({}, {"num_kv_blocks": 5}, {"max_model_len": 64}, {"max_num_seqs": 3}, {"seed": 5}):
        assert identity(folder, **settings) == first
    assert identity(folder).digest() == first.digest()
    assert first.first_difference(identity(folder)) is None


def test_packed_weights_have_the_identity_of_those_that_were_packed(folder: Path, tmp_path: Path) -> None:
    packed = {"packed_weights": str(tmp_path / "packed")}
    assert identity(folder) == identity(folder, **packed) == identity(folder, **packed)


def test_one_byte_of_any_tensor_is_another_identity(folder: Path) -> None:
    file, before = folder / "model.safetensors", identity(folder)
    whole = file.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8:start])
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    assert len(places) > 50
    for name, (begin, end) in places.items():
        spoilt = bytearray(whole)
        spoilt[start + (begin + end) // 4 * 2] ^= 1  # the lowest bit of an element in the middle
        file.write_bytes(spoilt)
        assert differing(identity(folder), before) == {"weights"}, name


SETTINGS: list[tuple[dict[str, object], set[str]]] = [
    ({"dtype": "float32"}, {"dtype", "weights", "layout", "kv_dtype"}),
    ({"quantization": "int8"}, {"quantization", "weights"}),
    ({"quantization": "int4"}, {"quantization", "weights"}),
    ({"kv_cache_dtype": "int8_per_token_head"}, {"kv_dtype", "layout"}),
    ({"kv_cache_dtype": "fp8_per_token_head"}, {"kv_dtype", "layout"}),
    ({"kv_cache_dtype": "fp8"}, {"kv_dtype", "layout", "weights"}),
    ({"block_size": 32}, {"block_size", "layout"}),
]


@pytest.mark.parametrize(("settings", "names"), SETTINGS)
def test_setting_is_another_identity(settings: dict[str, object], names: set[str], demo_model: Path) -> None:
    own, other = identity(demo_model), identity(demo_model, **settings)
    assert differing(other, own) == names
    assert own.digest() != other.digest()
    first = next(each.name for each in fields(KVIdentity) if each.name in names)
    assert own.first_difference(other) == f"{first} {getattr(own, first)!r}, not {getattr(other, first)!r}"


@pytest.mark.parametrize("isa", usable_isas())
def test_instruction_set_is_another_identity(isa: str, demo_model: Path) -> None:
    own = identity(demo_model, cpu_isa=isa)
    assert own.arithmetic == f"cpp {isa}"
    assert (own == identity(demo_model)) == (isa == usable_isas()[0])


CONFIGS: list[tuple[dict[str, object], set[str]]] = [
    ({"rms_norm_eps": 1e-6}, {"model"}),
    ({"rope_theta": 20_000.0}, {"rotary"}),
    ({"sliding_window": 32, "architectures": ["MistralForCausalLM"]}, {"model"}),
    ({"intermediate_size": 80}, {"model", "weights"}),
]


@pytest.mark.parametrize(("change", "names"), CONFIGS)
def test_config_is_another_identity(change: dict[str, object], names: set[str], small: Path) -> None:
    own = identity(small, load_format="dummy")
    assert differing(identity(changed(small, **change), load_format="dummy"), own) == names


def test_length_matters_where_tables_depend_on_it(small: Path) -> None:
    changed(small, rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=64)
    short, middle, long = (identity(small, load_format="dummy", max_model_len=length) for length in (32, 64, 128))
    assert short == middle
    assert differing(long, short) == {"rotary"}


def test_draft_model_is_a_part_of_the_identity(demo_model: Path, small: Path) -> None:
    options, loaded, cache = loaded_model(demo_model)
    drafts = [loaded_model(small, load_format="dummy")]
    changed(small, rms_norm_eps=1e-6)
    drafts.append(loaded_model(small, load_format="dummy"))
    found = {kv_identity(options, loaded, cache.joined(own), draft.model) for _, draft, own in drafts}
    assert differing(*found) == {"draft"}
    assert {differing(each, identity(demo_model)) == {"draft", "layout"} for each in found} == {True}


def test_rank_is_a_part_of_the_identity(demo_model: Path) -> None:
    options, loaded, cache = loaded_model(demo_model)
    found = [kv_identity(replace(options, tensor_parallel_size=2), loaded, cache, rank=rank) for rank in (0, 1)]
    assert differing(*found) == {"parallel"}
    assert differing(found[0], identity(demo_model)) == {"parallel"}


def test_each_field_is_in_the_digest_and_in_the_difference(demo_model: Path) -> None:
    own = identity(demo_model)
    for field in fields(KVIdentity):
        value = 77 if field.type is int else "other"
        other = replace(own, **{field.name: value})
        assert other.digest() != own.digest()
        assert own.first_difference(other) == f"{field.name} {getattr(own, field.name)!r}, not {value!r}"
        assert json.loads(other.as_json())[field.name] == value


def test_other_back_ends_have_no_identity(demo_model: Path) -> None:
    options, loaded, cache = loaded_model(demo_model)
    loaded.model.back_end = replace(loaded.model.back_end, name="torch")  # type: ignore[misc]
    with pytest.raises(ConfigError, match="back end torch have no identity"):
        kv_identity(options, loaded, cache)


def written(folder: Path, **settings: object) -> bytes:
    """Return the bytes of the KV cache after a prompt in two chunks, each tensor's as a whole."""
    _, loaded, cache = loaded_model(folder, **settings)
    tokens = np.random.RandomState(1).randint(0, 300, NUM_TOKENS).astype(np.int64)
    num_blocks = NUM_TOKENS // cache.block_size
    for start, stop in ((0, 29), (29, NUM_TOKENS)):
        places = np.arange(start, stop, dtype=np.int64)
        loaded.model.forward(ForwardBatch(
            tokens[start:stop], places, places, np.array([0, stop - start], np.int32), np.array([stop], np.int32),
            np.arange(num_blocks, dtype=np.int32)[None],
        ), cache)  # fmt: skip
    return b"".join(each[:num_blocks].tobytes() for each in cache.tensors)


# SHA-256 of keys and values by KV_EPOCH and instruction set, first 16 digits. Other bits need another KV_EPOCH: without
# it an engine would read what an older one has stored, and compute answers that are neither's.
WRITTEN: dict[int, dict[str, dict[str, str]]] = {
    1: {
        "portable": {
            "float32": "3bbeb7bc40da31ff", "bfloat16": "b816408eade220c6", "int8": "72652f2cf5719a83",
            "int4": "915ae51596756fc7", "int8 cache": "68d4320a923bcddb", "fp8 cache": "ed8f77f6d92bc38a",
            "GPT-2": "3dbbf3e5f3c7774c", "Gemma 2": "e3356caf1d0c73da", "Qwen 2 MoE": "308b7e293a10fca5",
        },
        "avx2": {
            "float32": "f6fd714fc4b8c64d", "bfloat16": "b816408eade220c6", "int8": "72652f2cf5719a83",
            "int4": "915ae51596756fc7", "int8 cache": "e57dd55eed21fe0c", "fp8 cache": "dd92e50560cb5b66",
            "GPT-2": "3dbbf3e5f3c7774c", "Gemma 2": "e3356caf1d0c73da", "Qwen 2 MoE": "308b7e293a10fca5",
        },
        "avx512": {
            "float32": "8357236fac554907", "bfloat16": "b816408eade220c6", "int8": "72652f2cf5719a83",
            "int4": "915ae51596756fc7", "int8 cache": "e57dd55eed21fe0c", "fp8 cache": "ed8f77f6d92bc38a",
            "GPT-2": "3dbbf3e5f3c7774c", "Gemma 2": "e3356caf1d0c73da", "Qwen 2 MoE": "308b7e293a10fca5",
        },
        "avx512_vnni": {
            "float32": "8357236fac554907", "bfloat16": "b816408eade220c6", "int8": "72652f2cf5719a83",
            "int4": "915ae51596756fc7", "int8 cache": "2949f79ded1892b0", "fp8 cache": "ed8f77f6d92bc38a",
            "GPT-2": "3dbbf3e5f3c7774c", "Gemma 2": "e3356caf1d0c73da", "Qwen 2 MoE": "308b7e293a10fca5",
        },
        "avx512_bf16": {
            "float32": "8357236fac554907", "bfloat16": "3ecd72733d8b1f19", "int8": "442de53d57a9a88f",
            "int4": "dcf9d09efb8b599d", "int8 cache": "7229d91497c9f3a8", "fp8 cache": "6b042438c4b0973d",
            "GPT-2": "bf9a036f57286537", "Gemma 2": "4076ce9030c4c200", "Qwen 2 MoE": "e5cd8c65402855d0",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("isa", usable_isas())
def test_other_bits_have_another_epoch(isa: str, demo_model: Path, tmp_path: Path) -> None:
    runs: dict[str, tuple[Path, dict[str, str]]] = {
        "float32": (demo_model, {"dtype": "float32"}),
        "bfloat16": (demo_model, {}),
        "int8": (demo_model, {"quantization": "int8"}),
        "int4": (demo_model, {"quantization": "int4"}),
        "int8 cache": (demo_model, {"kv_cache_dtype": "int8_per_token_head"}),
        "fp8 cache": (demo_model, {"kv_cache_dtype": "fp8_per_token_head"}),
    }
    for name, config in OTHERS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        runs[name] = tmp_path / name, {"load_format": "dummy", "dtype": "bfloat16"}
    found = {
        name: hashlib.sha256(written(folder, cpu_isa=isa, **settings)).hexdigest()[:16]
        for name, (folder, settings) in runs.items()
    }
    if isa not in WRITTEN[KV_EPOCH]:
        pytest.skip(f"digests of {isa} were not recorded, for want of such a CPU: {found}")
    assert found == WRITTEN[KV_EPOCH][isa]
