"""`quire plan` prints and writes what fits, loads no torch and reads no weight."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.embedders import write_json
from support.encoders import write_encoder
from support.quantized_folder import awq, awq_config, write_pair
from support.zero_model import write_zero_model

Run = Callable[..., Any]


def test_table_and_json_say_the_same(run: Run, tmp_path: Path) -> None:
    folder, path = write_zero_model(tmp_path, "Llama", "bfloat16"), tmp_path / "plan.json"
    ran = run("plan", folder, "--device-memory", "1GiB", "--max-num-seqs", 4, "--json", path)
    assert ran.code == 0, ran.err
    plan = json.loads(path.read_text())
    assert plan["num_parameters"] == plan["stored_parameters"]
    assert plan["memory_bytes"] == 2**30
    assert f"{plan['cache']['num_blocks']:,} blocks of 16" in ran.out
    assert plan["binds"] in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("Llama", {}, None),
        ("Mistral", {}, "4,096 tokens in all layers: blocks before the last 4,096 tokens are freed early"),
        (
            "Qwen3",
            {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
            "20 tokens in 1 of 2 layers: no block is freed early, the others need all",
        ),
    ],
)
def test_windows_are_told(run: Run, tmp_path: Path, name: str, changes: dict[str, object], told: str | None) -> None:
    folder, path = write_zero_model(tmp_path, name, "bfloat16", **changes), tmp_path / "plan.json"
    ran = run("plan", folder, "--device-memory", "1GiB", "--json", path)
    assert ran.code == 0, ran.err
    assert json.loads(path.read_text())["windows"] == (told or "")
    assert (told or "") in " ".join(ran.out.split())
    assert ("\nwindows" in ran.out) == (told is not None)


def test_quantization_is_told(run: Run, tmp_path: Path) -> None:
    folder, path = write_zero_model(tmp_path, "Llama", "bfloat16"), tmp_path / "plan.json"
    ran = run("plan", folder, "-q", "int8", "--device-memory", "1GiB", "--json", path)
    assert ran.code == 0, ran.err
    assert "quantization int8: int8 weights in groups of 128" in " ".join(ran.out.split())
    assert json.loads(path.read_text())["quantization"].startswith("int8: int8 weights")
    ran = run("plan", folder, "-q", "gptq", "--device-memory", "1GiB")
    assert ran.code != 0
    assert "quantization 'gptq' is the format of a checkpoint" in " ".join(ran.err.split())


def test_a_quantized_checkpoint_is_told_from_its_config(run: Run, tmp_path: Path) -> None:
    folder, path = write_pair(tmp_path, awq(32), awq_config(32)).folder, tmp_path / "plan.json"
    ran = run("plan", folder, "--device-memory", "1GiB", "--json", path)
    assert ran.code == 0, ran.err
    assert "quantization awq: int4 weights in groups of 32, int8 activations" in " ".join(ran.out.split())
    assert "the files hold" not in ran.out
    assert json.loads(path.read_text())["stored_parameters"] == 0


def test_difference_between_config_and_files_is_told(run: Run, tmp_path: Path) -> None:
    folder = write_zero_model(tmp_path, "Llama", "bfloat16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    ran = run("plan", folder, "--device-memory", "1GiB")
    assert ran.code == 0
    assert "the files hold" in ran.out


def test_nothing_is_loaded(tmp_path: Path) -> None:
    folder = write_zero_model(tmp_path, "Llama", "bfloat16")
    with (folder / "model.safetensors").open("r+b") as file:  # no weight is there to be read
        file.truncate(8 + int.from_bytes(file.read(8), "little"))
    code = (
        "import sys\nfrom quire.cli.main import main\n"
        f"try: main(['plan', {str(folder)!r}, '--device-memory', '1GiB'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hardware", "A99"), "hardware must be one of A100-40GB"),
        (("--device-memory", "much"), "device_memory must be bytes"),
        (("--device-memory", "1KiB"), "does not fit"),
    ],
)
def test_what_cannot_be_is_an_error(run: Run, tmp_path: Path, arguments: tuple[str, str], message: str) -> None:
    ran = run("plan", write_zero_model(tmp_path, "Llama", "bfloat16"), *arguments)
    assert ran.code == 1
    assert message in ran.err


def test_folder_without_config_is_an_error(run: Run, tmp_path: Path) -> None:
    ran = run("plan", tmp_path)
    assert ran.code == 1
    assert "config.json" in ran.err


def test_plan_of_several_engines_is_of_each(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    ran = run("plan", "-dp", 2, "--num-kv-blocks", 600, "--json", path)
    assert "2, each with what follows" in " ".join(ran.out.split())
    planned = json.loads(path.read_text())
    assert (planned["num_engines"], planned["cache"]["num_blocks"]) == (2, 300)


def test_plan_that_cannot_be_served_yet_is_marked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    marked = run("plan", "OPT-13B", "--hardware", "A100-80GB", "-dp", 2, "--json", path)
    assert "not servable yet: data_parallel_size 2 is not supported yet" in " ".join(marked.out.split())
    assert len(json.loads(path.read_text())["not_servable_yet"]) == 1
    plain = run("plan", "OPT-13B", "--hardware", "A100-40GB", "--json", path)
    assert "not servable" not in plain.out
    assert json.loads(path.read_text())["not_servable_yet"] == []


def test_encoder_has_no_cache_and_is_bound_by_the_rows_of_a_step(run: Run, tmp_path: Path) -> None:
    ran = run("plan", write_encoder(tmp_path, "Bert", kind="mean"), "--max-num-seqs", 4)
    assert ran.code == 0, ran.err
    for text in ("none: the model keeps no keys and values", "mean of 48 dimensions", "max_num_seqs: 4 requests of 64"):
        assert text in " ".join(ran.out.split())


def test_longest_request_is_that_of_sentence_transformers_as_in_the_engine(run: Run, tmp_path: Path) -> None:
    folder, path = write_encoder(tmp_path, "Bert", kind="mean"), tmp_path / "plan.json"
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 20})
    for flags, longest in (((), 20), (("--max-model-len", 30), 30)):
        assert run("plan", folder, *flags, "--json", path).code == 0
        assert json.loads(path.read_text())["scheduler"]["max_model_len"] == longest


def test_slots_for_states_are_told(run: Run, tmp_path: Path) -> None:
    """The sizes of Qwen3.5-35B-A3B: 30 delta nets with 32 value heads of 128 x 128, and rings of 5 tokens."""
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "vocab_size": 248_320, "moe_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512, "torch_dtype": "bfloat16",
        "max_position_embeddings": 262_144,
    }  # fmt: skip
    write_json(tmp_path / "config.json", config)
    flags = ["--device-memory", "128GiB", "--kv-cache-memory", "8GiB", "--json", tmp_path / "plan.json"]
    ran = run("plan", tmp_path, *flags)
    assert ran.code == 0, ran.err
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["slot_bytes"] == 30 * (32 * 128 * 128 * 4 + 5 * (2 * 16 * 128 + 32 * 128 + 2 * 32) * 2)
    assert plan["cache"]["num_state_slots"] == (4 << 30) // plan["slot_bytes"] == 65
    assert plan["kv_bytes_per_token"] == 10 * 2 * 256 * 2 * 2
    assert "65 slots of 62.4 MiB, 4.0 GiB: at most 43 sequences at once" in " ".join(ran.out.split())


def test_bytes_of_short_convolutions_are_told(run: Run, tmp_path: Path) -> None:
    """LFM2-1.2B as published: 6 layers of attention with 8 KV heads of 64, 10 of convolutions over 3 tokens."""
    config = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65_536, "block_ff_dim": 12_288,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "torch_dtype": "bfloat16",
    }  # fmt: skip
    write_json(tmp_path / "config.json", config)
    found = {}
    for drafts in ([], ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']):
        ran = run("plan", tmp_path, "--device-memory", "16GiB", "--json", tmp_path / "plan.json", *drafts)
        assert ran.code == 0, ran.err
        plan = json.loads((tmp_path / "plan.json").read_text())
        assert "of each block, for 10 layers: prefixes are found at the end of each block" in " ".join(ran.out.split())
        assert plan["num_parameters"] == 1_170_340_608
        found[len(drafts)] = plan["kv_bytes_per_token"], plan["tail_bytes"]
    assert found[0] == (6 * 8 * 64 * 2 * 2 + 10 * 3 * 2048 * 2 // 16, 10 * 3 * 2048 * 2)
    assert found[2] == (6 * 8 * 64 * 2 * 2 + 10 * 7 * 2048 * 2 // 16, 10 * 7 * 2048 * 2)
