"""Steps in which not all rows are read: those that are have the bits of a step that reads all."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.read_rows import ReadRowsOp, of_read_rows
from quire.model.loader import load_model
from support.random_folder import HYBRID, write_random_folder

SIZES: dict[str, object] = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
SHARED = SIZES | {
    "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 5, "sliding_window": 13, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 320,
}  # fmt: skip
CONVOLUTIONS = SIZES | {
    "architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 2, "layer_types": ["full_attention", "conv"],
}  # fmt: skip
LATENTS = SIZES | {
    "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 64,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, object], str]] = {  # and the last op that keeps something
    "dense": (SIZES | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}, "layers.1.rotary_write"),
    "states": (HYBRID | {"num_hidden_layers": 3}, "layers.2.delta"),
    "shared": (SHARED, "layers.2.rotary_write"),
    "convolutions": (CONVOLUTIONS, "layers.1.conv"),
    "latents": (LATENTS, "layers.1.rotary_write"),
}  # fmt: skip
STEPS: tuple[tuple[dict[str, int], list[int]], ...] = (  # tokens of each sequence, and how many are read
    ({"a": 9, "b": 21}, [0, 0]),
    ({"c": 5, "a": 12, "b": 1}, [0, 3, 1]),
    ({"a": 1, "c": 17}, [1, 1]),
    ({"b": 2, "c": 4}, [2, 4]),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_that_are_read_have_the_bits_of_a_step_that_reads_all(
    name: str, dtype: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable
) -> None:
    decoder = load_model(write_random_folder(tmp_path / name, CONFIGS[name][0]), dtype=dtype, back_end=back_end)
    whole, runner, generator = paged_runner(decoder), paged_runner(decoder), torch.Generator().manual_seed(0)
    for counts, num_read in STEPS:
        pieces = {
            each: torch.randint(320, (count,), generator=generator).tolist() for each, count in counts.items()
        }
        expected, found = whole.step(pieces), runner.step(pieces, num_read)
        for each, count in zip(pieces, num_read, strict=True):
            assert torch.equal(found[each][len(pieces[each]) - count :], expected[each][len(pieces[each]) - count :])


@pytest.mark.parametrize("name", CONFIGS)
def test_ops_behind_the_last_that_keeps_something_are_for_rows_that_are_read(name: str, tmp_path: Path) -> None:
    config, last = CONFIGS[name]
    back_end = choose_back_end(torch.device("cpu"), "torch")  # its programs are single ops
    program = load_model(write_random_folder(tmp_path / name, config), back_end=back_end)._programs.whole
    cut = of_read_rows(program)
    assert cut is not None
    *kept, rest = cut.ops
    assert isinstance(rest, ReadRowsOp)
    assert kept[-1].name == last
    assert (*kept, *rest.program.ops) == program.ops
