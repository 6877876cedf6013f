"""PEFT folders from any hands: each is read, or ends in a ModelError that names file and reason."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quire.core.errors import ModelError
from quire.engine.adapters.peft_weights import LoadedAdapter, ModelTargets, parse_config
from quire.kernels.choice import choose_back_end
from quire.model.families.multimodal import PREFIXES
from quire.model.sharding import Shard
from quire.model.source import read_folder
from support.hostile_models import is_refused
from support.peft_folders import write_adapter
from support.random_model import write_random_model

Read = Callable[[], LoadedAdapter]
STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model."""
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def targets(model: Path) -> ModelTargets:
    """Return what an adapter may change of it."""
    return ModelTargets(read_folder(model).spec, choose_back_end(torch.device("cpu")), torch.float16, Shard(0, 1), {})


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """Write an adapter."""
    return write_adapter(tmp_path / "adapter", model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora True is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save a list of 1 is not supported"),
        ({"bias": "all"}, "bias must be none, got 'all'"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type must be CAUSAL_LM, got 'SEQ_CLS'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
        ({"r": 0}, "r must be an integer of at least 1, got 0"),
        ({"r": True}, "r must be an integer of at least 1, got True"),
        ({"r": 9}, r"lora_A of .* has shape \[8, \d+\], expected \[9, \d+\] of rank 9"),
        ({"r": 17}, "has rank 17, which is greater than max_lora_rank 16"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number from -1e\\+06 to 1e\\+06, got nan"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
        ({"rank_pattern": {"(a+)+b": 4}}, r"rank_pattern has the key '\(a\+\)\+b'; keys must be names"),
        ({"alpha_pattern": {"q_proj": -1e300}}, r"alpha_pattern\['q_proj'\] must be a number"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object, got a list of 1"),
        ({"target_parameters": ["x"]}, "target_parameters a list of 1 is not supported"),
    ],
)
def test_configurations_that_are_not_served_are_refused_by_name(
    change: dict[str, Any], message: str, folder: Path, targets: ModelTargets
) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message) as refused:
        targets.read(folder, 16)
    assert str(folder) in str(refused.value)


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def set_tensor(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_tensor(f"{STEM}.lora_magnitude_vector.weight", torch.ones(3)), "is not supported: DoRA"),
        (set_tensor("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(3)), "factors of embeddings"),
        (set_tensor("base_model.model.lm_head.modules_to_save.weight", torch.ones(3)), "modules_to_save"),
        (set_tensor(f"{STEM}.lora_B.bias", torch.ones(3)), "is not supported: biases"),
        (set_tensor(f"{STEM}.weight", torch.ones(3)), "no factor of a LoRA"),
        (set_tensor("base_model.model.lm_head.lora_A.weight", torch.ones(8, 72)), "no target module 'lm_head'; of its"),
        (
            set_tensor("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", torch.ones(8, 72)),
            "no target module 'model.layers.7.self_attn.q_proj'",
        ),
        (set_tensor(f"{STEM}.lora_A.weight", torch.ones(8, 71)), r"has shape \[8, 71\], expected \[8, 72\]"),
        (set_tensor(f"{STEM}.lora_B.weight", torch.ones(144)), r"has shape \[144\], expected \[144, 8\]"),
        (set_tensor(f"{STEM}.lora_A.weight", torch.ones(8, 72, dtype=torch.int32)), "has dtype int32"),
        (set_tensor(f"{STEM}.lora_A.weight", torch.full((8, 72), torch.nan)), "lora_A of .* are not finite"),
        (set_tensor(f"{STEM}.lora_B.weight", torch.full((144, 8), 1e30)), "lora_B of .* not finite in float16"),
        (lambda tensors: tensors.pop(f"{STEM}.lora_B.weight"), "lora_A or lora_B of .*q_proj is missing"),
        (lambda tensors: tensors.clear(), "no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, folder: Path, targets: ModelTargets
) -> None:
    spoil(folder, change)
    with pytest.raises(ModelError, match=message) as refused:
        targets.read(folder, 16)
    assert str(folder) in str(refused.value)


def test_only_safetensors_inside_of_the_folder_and_no_larger_than_an_adapter_are_read(
    folder: Path, targets: ModelTargets, tmp_path: Path
) -> None:
    weights, outside = folder / "adapter_model.safetensors", tmp_path / "outside"
    os.rename(weights, folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"no file adapter_model.safetensors; other formats"):
        targets.read(folder, 16)
    os.rename(folder / "adapter_model.bin", outside)
    weights.symlink_to(outside)
    with pytest.raises(ModelError, match=r"links to .*outside of the model folder"):
        targets.read(folder, 16)
    weights.unlink()
    with weights.open("wb") as file:
        file.truncate(targets.max_bytes(16) + 1)
    with pytest.raises(ModelError, match=f"larger than {targets.max_bytes(16)} bytes"):
        targets.read(folder, 16)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match=r"no file adapter_model.safetensors"):
        targets.read(folder, 16)
    with pytest.raises(ModelError, match=r"no file adapter_config.json"):
        targets.read(tmp_path / "nowhere", 16)


def test_digest_is_of_both_files(folder: Path, targets: ModelTargets) -> None:
    first = targets.read(folder, 16)
    assert targets.read(folder, 16).digest == first.digest
    config = folder / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    second = targets.read(folder, 16)
    spoil(folder, lambda tensors: tensors[f"{STEM}.lora_A.weight"].add_(1))
    assert len({first.digest, second.digest, targets.read(folder, 16).digest}) == 3
    assert first.rank == 8
    assert first.weights.num_bytes > 0


def test_names_with_the_adapter_and_without_prefixes_are_read(folder: Path, targets: ModelTargets) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)

    spoil(folder, rename)
    assert len(targets.read(folder, 16).weights.layers) == 8


def renamed(folder: Path, parent: str) -> None:
    """Put the modules of an adapter of a text model below another parent."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("base_model.model.model.", f"base_model.model.{parent}")] = tensors.pop(name)

    spoil(folder, rename)


@pytest.mark.parametrize("parent", ["", "model.", *PREFIXES])
def test_adapter_of_a_text_model_fits_it_as_a_part_of_a_wrapped_model(parent: str, model: Path, folder: Path) -> None:
    spec = read_folder(model).spec
    spec = replace(spec, weights=replace(spec.weights, prefixes=PREFIXES))
    targets = ModelTargets(spec, choose_back_end(torch.device("cpu")), torch.float16, Shard(0, 1), {})
    renamed(folder, parent)
    assert len(targets.read(folder, 16).weights.layers) == 8


@pytest.mark.parametrize("parent", ["language_model.", *PREFIXES])
def test_adapter_of_a_wrapped_model_is_refused_by_a_text_model(
    parent: str, folder: Path, targets: ModelTargets
) -> None:
    renamed(folder, parent)
    with pytest.raises(ModelError, match=rf"no target module '{parent}layers\.0\."):
        targets.read(folder, 16)


def test_other_parts_of_a_model_and_a_module_by_two_names_are_refused_by_name(
    folder: Path, targets: ModelTargets
) -> None:
    def add(stem: str) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for half in "AB":
                tensors[f"{stem}.lora_{half}.weight"] = tensors[f"{STEM}.lora_{half}.weight"].clone()

        return change

    spoil(folder, add("base_model.model.layers.0.self_attn.q_proj"))
    with pytest.raises(ModelError, match=r"'layers\.0\..*are the same module of the model"):
        targets.read(folder, 16)
    spoil(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".model.model." not in name])
    spoil(folder, add("base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj"))
    with pytest.raises(ModelError, match=r"no target module 'model\.vision_tower\.encoder\.layers\.0"):
        targets.read(folder, 16)


JUNK = st.sampled_from([None, True, 0, -1, 3, 2**63, 1e308, "", "x", "\0", [], [0], {}, {"q_proj": 2}, {"\\d+": 1}])
KEYS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "bias", "init_lora_weights")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_spoilt_folders_are_read_or_refused(
    data: st.DataObject, model: Path, targets: ModelTargets, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "spoilt", model, targets=("q_proj", "down_proj"), rank=4)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if data.draw(st.booleans(), "config"):
        changed = json.loads(config.read_text()) | {data.draw(st.sampled_from(KEYS), "key"): data.draw(JUNK, "value")}
        config.write_text(json.dumps(changed))
    else:
        content = bytearray(weights.read_bytes())
        for _ in range(data.draw(st.integers(1, 4), "bytes")):
            content[data.draw(st.integers(0, min(len(content), 600) - 1), "at")] = data.draw(st.integers(0, 255), "is")
        weights.write_bytes(content[: data.draw(st.integers(1, len(content)), "kept")])
    is_refused(lambda: targets.read(folder, 16), folder, repr(config.read_text()))


def test_patterns_match_ends_of_names_after_a_dot() -> None:
    content = json.dumps(
        {
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True,
            "rank_pattern": {"q_proj": 16, "^model.layers.0.mlp.up_proj": 9}, "alpha_pattern": {r"1\.k_proj$": 1},
        }
    )  # fmt: skip
    config = parse_config(content.encode(), Path("adapter_config.json"))
    assert config.factor_of("model.layers.0.q_proj") == (16, 2.0)
    assert config.factor_of("model.layers.0.my_q_proj") == (4, 4.0)
    assert config.factor_of("model.layers.0.mlp.up_proj") == (9, 8 / 3)
    assert config.factor_of("x.model.layers.0.mlp.up_proj") == (4, 4.0)
    assert config.factor_of("layers.1.k_proj") == (4, 0.5)
    assert config.factor_of("layers.11.k_proj") == (4, 4.0)
