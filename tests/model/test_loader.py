"""Loading: what is read, what it becomes, and that every broken or hostile folder ends in an error that says why."""

import json
import logging
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.core.arrays import dtype_name
from quire.core.errors import ConfigError, ModelError
from quire.kernels.back_end import BackEnd
from quire.kernels.tensors import NUMPY_LIBRARY
from quire.model import rope
from quire.model.checkpoints import safetensors
from quire.model.config import read_config, spec_from_config
from quire.model.loader import load_model
from support.random_folder import write_random_folder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"
WIDE, INNER = 32, 56
OLMO_HYBRID: dict[str, object] = {
    "architectures": ["OlmoHybridForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "linear_key_head_dim": 16, "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def test_dtype_auto_is_the_configs_own_in_either_spelling(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    folder = write_llama({"torch_dtype": "bfloat16"})
    assert load_model(folder, back_end=back_end).dtype == back_end.library.dtype("bfloat16")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder, back_end=back_end).dtype == back_end.library.dtype("float16")
    assert load_model(folder, dtype="float32", back_end=back_end).dtype == back_end.library.dtype("float32")


def test_unknown_dtype_is_a_config_error(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    with pytest.raises(ConfigError, match="float8"):
        load_model(write_llama(), dtype="float8", back_end=back_end)


def test_sizes_are_counted(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    folder = write_llama()
    decoder = load_model(folder, dtype="bfloat16", back_end=back_end)
    tensors = load_file(folder / WEIGHTS)
    assert decoder.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert decoder.weight_bytes == 2 * decoder.num_parameters + _packing_bytes(tensors, back_end)


def _packing_bytes(tensors: dict[str, torch.Tensor], back_end: BackEnd) -> int:
    """Bytes beyond two per parameter: of the stand-in float32 weights, on some CPUs the head's alone; of the extension
    inputs and outputs that it pads.
    """
    layers = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name}
    if back_end.name == "torch":
        has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return sum(2 * layer.numel() for name, layer in layers.items() if name == "lm_head.weight" or not has_bfloat16)
    columns = sum(2 * len(layer) * (-layer.shape[1] % 32) for layer in layers.values())
    gates_and_ups = [layer for name, layer in layers.items() if "gate_proj" in name or "up_proj" in name]
    return columns + sum(2 * (-len(layer) % 16) * (layer.shape[1] + -layer.shape[1] % 32) for layer in gates_and_ups)


def test_tied_head_counts_once(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    folder = write_llama({"tie_word_embeddings": True}, {"lm_head.weight": None})
    tensors = load_file(folder / WEIGHTS)
    assert load_model(folder, back_end=back_end).num_parameters == sum(tensor.numel() for tensor in tensors.values())


def test_head_of_a_tied_checkpoint_that_carries_one_is_used(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    folder = write_llama()
    untied = paged_runner(load_model(folder, back_end=back_end)).step({"a": [1, 2, 3]})["a"]
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(paged_runner(load_model(folder, back_end=back_end)).step({"a": [1, 2, 3]})["a"], untied)


def test_rotary_table_may_be_cut_to_the_positions_in_use(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    folder = write_llama()
    whole = paged_runner(load_model(folder, back_end=back_end)).step({"a": [4, 5, 6]})["a"]
    cut = paged_runner(load_model(folder, back_end=back_end, max_positions=3)).step({"a": [4, 5, 6]})["a"]
    assert torch.equal(whole, cut)
    cut = paged_runner(load_model(folder, back_end=back_end, table_positions=3)).step({"a": [4, 5, 6]})["a"]
    assert torch.equal(whole, cut)


def test_rotary_tables_are_filled_as_far_as_a_step_reaches(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "POSITIONS_AT_ONCE", 16)
    decoder = load_model(write_llama(), back_end=back_end)
    (table,) = decoder._rotary.tables
    runner, tokens, is_lazy = paged_runner(decoder), list(range(40)), back_end.library is NUMPY_LIBRARY
    found = [runner.step({"a": tokens[:10]})["a"]]
    assert table.num_filled == (16 if is_lazy else len(table.values))
    found += [runner.step({"a": [token]})["a"] for token in tokens[10:]]
    assert table.num_filled == (48 if is_lazy else len(table.values))
    assert torch.equal(torch.cat(found), paged_runner(decoder).step({"b": tokens})["b"])


def test_unread_tensors_are_named_in_the_log(
    write_llama: Callable[..., Path], back_end: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(WIDE), "model.rotary_emb.inv_freq": torch.zeros(4)}
    with caplog.at_level(logging.WARNING, logger="quire"):
        load_model(write_llama(tensors=extra), back_end=back_end)
    assert "1 tensors of the checkpoint are not used: model.layers.0.self_attn.q_proj.bias" in caplog.text


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({DOWN: None}, rf"{DOWN} is missing; expected shape \[32, 56\]"),
        ({DOWN: torch.zeros(INNER, WIDE)}, rf"{DOWN} has shape \[56, 32\], expected \[32, 56\]"),
        ({DOWN: torch.zeros(WIDE, INNER, dtype=torch.int8)}, rf"{DOWN} has dtype I8.*quantized"),
        ({DOWN: torch.full((WIDE, INNER), math.nan)}, rf"{DOWN} has values that are NaN or infinite"),
        ({DOWN: torch.zeros(WIDE, INNER).index_fill(0, torch.tensor([3]), math.inf)}, f"{DOWN} has values"),
        ({DOWN: torch.zeros(WIDE * INNER)}, rf"{DOWN} has shape \[1792\]"),
        ({"model.norm.weight": torch.zeros(0)}, r"model.norm.weight has shape \[0\], expected \[32\]"),
        ({"model.embed_tokens.weight": torch.zeros(95, WIDE)}, r"shape \[95, 32\], expected \[96, 32\]"),
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
    ],
    ids=["missing", "transposed", "integers", "nan", "infinity", "flat", "empty", "vocabulary", "head"],
)
def test_bad_tensors_are_named(
    write_llama: Callable[..., Path], back_end: BackEnd, tensors: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(write_llama(tensors=tensors), back_end=back_end)


@pytest.mark.parametrize("name", ["q_conv1d", "v_conv1d"])
def test_a_missing_part_of_a_convolution_is_named(name: str, tmp_path: Path, back_end: BackEnd) -> None:
    folder, missing = write_random_folder(tmp_path, OLMO_HYBRID), f"model.layers.0.linear_attn.{name}.weight"
    tensors = load_file(folder / WEIGHTS)
    save_file({key: tensor for key, tensor in tensors.items() if key != missing}, folder / WEIGHTS)
    shape = list(tensors[missing].shape)
    with pytest.raises(ModelError, match=re.escape(f"{missing} is missing; expected shape {shape}")):
        load_model(folder, back_end=back_end)


def test_values_too_large_for_the_dtype_are_refused(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    folder = write_llama(tensors={DOWN: torch.full((WIDE, INNER), 1e5)})
    load_model(folder, dtype="bfloat16", back_end=back_end)
    with pytest.raises(ModelError, match=f"{DOWN} has values that are NaN or infinite in float16"):
        load_model(folder, dtype="float16", back_end=back_end)


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def absurd_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((2**62).to_bytes(8, "little") + b"{}")


def pickle_only(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def weights_are_a_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def link_outside(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, folder.parent / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere.safetensors")


def write_index(folder: Path, index: object) -> None:
    (folder / WEIGHTS).rename(folder / "shard-1.safetensors")
    (folder / INDEX).write_text(json.dumps(index))


def index_to(place: str) -> Callable[[Path], None]:
    def break_folder(folder: Path) -> None:
        names = load_file(folder / WEIGHTS).keys()
        shutil.copy(folder / WEIGHTS, folder.parent / "outside.safetensors")
        where = place.replace("FOLDER", str(folder.parent))
        write_index(folder, {"weight_map": dict.fromkeys(names, where)})

    return break_folder


def index_invents_a_tensor(folder: Path) -> None:
    write_index(folder, {"weight_map": {"model.invented.weight": "shard-1.safetensors"}})


def index_is_not_a_map(folder: Path) -> None:
    write_index(folder, {"weight_map": ["shard-1.safetensors"]})


@pytest.mark.parametrize(
    ("break_folder", "message"),
    [
        (truncate, "model.safetensors: not a whole safetensors file"),
        (empty, "model.safetensors: not a whole safetensors file"),
        (absurd_header, "model.safetensors: not a whole safetensors file"),
        (pickle_only, "neither model.safetensors nor model.safetensors.index.json"),
        (weights_are_a_folder, "no file model.safetensors"),
        (link_outside, "links to .*elsewhere.safetensors, outside of the model folder"),
        (index_to("../outside.safetensors"), "'../outside.safetensors' is not a plain file name"),
        (index_to("FOLDER/outside.safetensors"), "/outside.safetensors' is not a plain file name"),
        (index_to("sub/../../outside.safetensors"), "is not a plain file name"),
        (index_to(""), "'' is not a plain file name"),
        (index_to("missing.safetensors"), "no file missing.safetensors"),
        (index_invents_a_tensor, "places tensor model.invented.weight in shard-1.safetensors, which does not have it"),
        (index_is_not_a_map, "weight_map must map tensor names to file names"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_or_hostile_files_are_named(
    write_llama: Callable[..., Path], back_end: BackEnd, break_folder: Callable[[Path], None], message: str
) -> None:
    folder = write_llama()
    load_model(folder, back_end=back_end)
    break_folder(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder, back_end=back_end)
    assert str(folder) in str(caught.value)


def test_links_of_the_hubs_cache_are_followed(
    write_llama: Callable[..., Path], back_end: BackEnd, tmp_path: Path
) -> None:
    source = write_llama()
    model = tmp_path / "models--owner--name"
    snapshot, blobs = model / "snapshots" / "0123abcd", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        shutil.move(file, blobs / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    assert load_model(snapshot, back_end=back_end).spec.num_layers == 2
    (snapshot / WEIGHTS).unlink()
    shutil.move(blobs / f"blob-of-{WEIGHTS}", model / "beside-the-blobs")
    (snapshot / WEIGHTS).symlink_to("../../beside-the-blobs")
    with pytest.raises(ModelError, match="outside of the model folder"):
        load_model(snapshot, back_end=back_end)


def test_a_folder_behind_a_link_loads(write_llama: Callable[..., Path], back_end: BackEnd, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write_llama())
    assert load_model(tmp_path / "link", back_end=back_end).spec.num_layers == 2


def test_one_file_wins_over_an_index(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    folder = write_llama()
    (folder / INDEX).write_text("not even JSON")
    assert load_model(folder, back_end=back_end).spec.num_layers == 2


def test_shards_are_found_through_the_index(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    folder = write_llama()
    expected = paged_runner(load_model(folder, back_end=back_end)).step({"a": [7, 8]})["a"]
    tensors = load_file(folder / WEIGHTS)
    files = {name: f"shard-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert torch.equal(paged_runner(load_model(folder, back_end=back_end)).step({"a": [7, 8]})["a"], expected)


def test_nothing_of_a_file_stays_mapped(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    folder = write_llama()
    decoder = load_model(folder, back_end=back_end)
    assert dtype_name(decoder.dtype) == "float32", "the file's own: nothing was converted"
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_pages_that_are_dropped_before_each_tensor_give_the_same_model(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_llama()
    expected = paged_runner(load_model(folder, back_end=back_end)).step({"a": [7, 8]})["a"]
    monkeypatch.setattr(safetensors, "RESIDENT_BYTES", 0)
    assert torch.equal(paged_runner(load_model(folder, back_end=back_end)).step({"a": [7, 8]})["a"], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_may_begin_at_any_byte(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable, dtype: str
) -> None:
    """A header may have any length, so weights need not be aligned to their elements."""
    folder = write_llama({"torch_dtype": dtype})
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    expected = paged_runner(load_model(folder, back_end=back_end)).step({"a": [7, 8]})["a"]
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip() + b" "
    header += b" " * (len(header) % 2 == 0)
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    assert torch.equal(paged_runner(load_model(folder, back_end=back_end)).step({"a": [7, 8]})["a"], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 8]}, "not a whole safetensors file"),
        ({"data_offsets": [8, 0]}, "not a whole safetensors file"),
        ({"data_offsets": [2**60, 2**60 + WIDE * INNER * 4]}, "not a whole safetensors file"),
        ({"data_offsets": [-8, 0]}, "not a whole safetensors file"),
        ({"shape": [2**32, 2**32]}, "not a whole safetensors file"),
        ({"dtype": "F128"}, "not a whole safetensors file"),
    ],
    ids=["overlapping", "backwards", "outside", "negative", "overflowing", "unknown"],
)
def test_hostile_entries_of_a_header_are_refused(
    write_llama: Callable[..., Path], back_end: BackEnd, change: dict[str, object], message: str
) -> None:
    folder = write_llama()
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[DOWN] |= change
    changed = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(ModelError, match=message):
        load_model(folder, back_end=back_end)


ENTRY = b'{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
OTHER = ENTRY.replace(b"[0, 8]", b"[8, 16]")


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"{}", 2**64 - 1),
        (b"{}", 2**63),
        (b" " * 2**20, 101 * 2**20),
        (b'{"a": ' + ENTRY + b', "a": ' + OTHER + b"}", None),
        (b'{"a": ' + ENTRY + b', "b": ' + ENTRY + b"}", None),
        (ENTRY.replace(b"[2]", b"[" * 100_000 + b"]" * 100_000), None),
        (b'{"__metadata__": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", None),
        (b'{"a": ' + ENTRY.replace(b"[2]", b"[-2]") + b"}", None),
        (b'{"a": ' + ENTRY.replace(b"[2]", b"[3]") + b"}", None),
        (b'{"a": ' + ENTRY.replace(b"8]", b"8.0]") + b"}", None),
    ],
    ids=["length of -1", "length of 2**63", "long", "name twice", "bytes twice", "deep", "deep metadata", "negative",
         "another size", "no integer"],
)  # fmt: skip
def test_hostile_headers_are_refused(
    write_llama: Callable[..., Path], back_end: BackEnd, header: bytes, length: int | None
) -> None:
    folder = write_llama()
    size = (len(header) if length is None else length).to_bytes(8, "little")
    (folder / WEIGHTS).write_bytes(size + header + bytes(16))
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load_model(folder, back_end=back_end)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as text"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
    ],
    ids=["cut off", "empty", "not text", "list", "null", "deep", "long number"],
)
def test_broken_config_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no file config\.json"):
        read_config(tmp_path)


LATENT: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -32}, "hidden_size must be an integer from 1"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1"),
        ({"hidden_size": "32"}, "hidden_size must be an integer from 1 to .*, got '32'"),
        ({"hidden_size": 32.0}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 10**40}, "got an integer of 30 digits or more"),
        ({"vocab_size": 2**40}, "vocab_size must be an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 4096"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings must be an integer"),
        ({"num_attention_heads": 5}, "hidden_size = 32 does not divide into 5 equal parts"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide among 3 key-value heads"),
        ({"head_dim": 7}, "even head_dim, got 7"),
        ({"head_dim": 2**24}, "head_dim must be an integer from 1 to 65536, got 16777216"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number from 1e-30 to .*, got nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"rope_theta": math.inf}, "rope_theta must be a number from 1e-30 to .*, got inf"),
        ({"rope_theta": -1}, "rope_theta must be a number from 1e-30 to 1e"),
        ({"rope_theta": 10**400}, "rope_theta must be a number from 1e-30 to 1e.*, got an integer of 30 digits"),
        ({"rope_theta": 1e-300}, "rope_theta must be a number from"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type must be one of default, .*, proportional, got 'ntk'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor must be a list of 4 numbers, got None"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1, 0], "long_factor": [1] * 4}},
            "short_factor: 3 must be a number from 1e-30",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a number from 1e-30 to 1e"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported yet"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, swish, got 'gelu'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"quantization_config": {"bits": 4}}, "weights are quantized, and only floating-point weights are read here"),
        ({"architectures": ["NewForCausalLM"]}, "unknown architecture 'NewForCausalLM'; known are .*Qwen3"),
        ({"architectures": ["BloomForCausalLM"]}, r"'BloomForCausalLM' is not supported yet: .*\(ALiBi\)"),
        ({"architectures": ["DeepseekV4Model"]}, "'DeepseekV4Model' is not supported yet: compressed attention"),
        ({"architectures": ["DeepseekV3Model"]}, "kv_lora_rank is missing"),
        (LATENT | {"kv_lora_rank": 20}, "latents of 20 dimensions are not supported: multiples of 8 are"),
        (LATENT | {"qk_rope_head_dim": 7}, "rotary embedding needs an even head_dim, got 7"),
        (LATENT | {"v_head_dim": None}, "v_head_dim is missing"),
        (LATENT | {"attention_bias": True}, "attention_bias = True is not supported yet: its projections have no bias"),
        (LATENT | {"topk_method": "greedy"}, "topk_method must be one of noaux_tc, got 'greedy'"),
        (LATENT | {"n_group": 3}, "8 experts do not divide into 1 of 3 groups of equal size"),
        ({"architectures": ["JambaForCausalLM"]}, "JambaForCausalLM' is not supported yet: of recurrent layers, gated"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "is not supported yet: of encoders, BERT,"),
        ({"architectures": ["FalconForCausalLM"], "alibi": True}, "alibi = True is not supported yet: biases of"),
        ({"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "parallel_attn": False},
         "parallel_attn must be true with new_decoder_architecture"),
        ({"architectures": ["OlmoForCausalLM"], "clip_qkv": 0}, "clip_qkv must be a number from 1e-30"),
        ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "qwen2"}},
         "text_config: model_type must be one of mistral, ministral3, mistral4, got 'qwen2'"),
        ({"architectures": [["LlamaForCausalLM"]]}, "unknown architecture"),
        ({"architectures": None, "model_type": "rwkv"}, "unknown model_type 'rwkv'; known are .*GPT2LMHeadModel"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
         "windows: 1 entries for 2 layers"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["a", "b"]}, "layer_types must be a list of"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window must be an integer from 1"),
    ],
    ids=lambda value: ",".join(f"{k}={v!s:.20}" for k, v in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_config_values_are_named(
    write_llama: Callable[..., Path], back_end: BackEnd, changes: dict[str, object], message: str
) -> None:
    folder = write_llama(changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder, back_end=back_end)
    assert str(folder / "config.json") in str(caught.value)


def test_unknown_dtype_in_the_config_is_a_model_error(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    with pytest.raises(ModelError, match="torch_dtype must be one of float32, bfloat16, float16, got 'int4'"):
        load_model(write_llama({"torch_dtype": "int4"}), back_end=back_end)


def test_config_that_names_no_architecture_is_known_by_its_model_type(write_llama: Callable[..., Path]) -> None:
    config = read_config(write_llama({"architectures": None}))
    assert spec_from_config(config).attentions[0].num_kv_heads == 2


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_flipped_bytes_load_or_end_in_a_model_error(
    write_llama: Callable[..., Path], back_end: BackEnd, name: str
) -> None:
    folder = write_llama()
    whole = (folder / name).read_bytes()
    header_bytes = min(len(whole), 1200)  # the part of the file that says what is where
    rng = random.Random(4)
    num_refused = 0
    for _ in range(150):
        broken = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(header_bytes)] = rng.randrange(256)
        (folder / name).write_bytes(broken)
        try:
            load_model(folder, back_end=back_end)
        except ModelError:
            num_refused += 1
    assert num_refused > 75
