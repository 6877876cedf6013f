"""A plan says what the loaded engine says, for every family; and clearly what cannot be."""

from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.errors import ConfigError, ModelError
from quire.engine.assembly import assemble
from quire.engine.options import EngineOptions
from quire.execution import device
from quire.model.quantization import QuantizationOptions
from quire.model.sharding import check_shardable
from quire_lab.sim.hardware import HARDWARE, CostModel, Hardware
from quire_lab.sim.models import read_draft_model, read_model
from quire_lab.sim.planning import not_servable_yet, plan_memory, stored_parameters
from support.zero_model import FAMILIES, write_zero_model

MIB = 2**20


def this_machine(memory_bytes: int) -> Hardware:
    return Hardware("this machine", memory_bytes, 1.0, 1.0, device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_plan_is_what_the_engine_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    folder = str(write_zero_model(tmp_path, name, dtype))
    options, memory_bytes = EngineOptions(model=folder, max_num_seqs=8, max_num_batched_tokens=32), 100 * MIB
    plan = plan_memory(read_model(folder), this_machine(memory_bytes), options)
    monkeypatch.setattr(device, "free_memory_bytes", lambda: memory_bytes - plan.weight_bytes)
    loaded = assemble(options, loads_tokenizer=False)
    if loaded.model.back_end.name != "cpp":
        pytest.skip("the C++ kernels were not built")
    limits = loaded.engine.scheduler.limits
    assert plan.num_parameters == loaded.model.num_parameters == stored_parameters(tmp_path)
    assert plan.weight_bytes == loaded.model.weight_bytes
    assert plan.kv_bytes_per_token == loaded.ready.kv_bytes_per_token
    assert plan.cache.num_blocks == pytest.approx(limits.num_blocks, rel=0.03)
    assert plan.scheduler.max_model_len == limits.max_model_len
    assert (plan.dtype, plan.cache.block_size) == (dtype, limits.block_size)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"kv_cache_dtype": "int8_per_token_head"}])
def test_plan_with_a_draft_model_is_what_the_engine_reports(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    draft_model = str(Path(__file__).parents[2] / "data/demo-draft")
    options = EngineOptions(max_num_seqs=40, max_num_batched_tokens=32, spec_model=draft_model, **settings)  # type: ignore[arg-type]
    model = read_model(str(demo_model), asked=options.quantization_options)
    draft, memory_bytes = read_draft_model(model, options), 200 * MIB
    plan = plan_memory(model, this_machine(memory_bytes), options, draft=draft)
    taken = plan.weight_bytes + plan.draft_weight_bytes
    monkeypatch.setattr(device, "free_memory_bytes", lambda: memory_bytes - taken)
    loaded = assemble(options, loads_tokenizer=False)
    if loaded.model.back_end.name != "cpp":
        pytest.skip("the C++ kernels were not built")
    assert taken == loaded.ready.weights_bytes
    assert plan.kv_bytes_per_token == loaded.ready.kv_bytes_per_token
    assert plan.cache.num_blocks == pytest.approx(loaded.ready.limits.num_blocks, rel=0.03)
    without = plan_memory(model, this_machine(memory_bytes), replace(options, spec_model=None))
    assert without.kv_bytes_per_token < plan.kv_bytes_per_token


@pytest.mark.parametrize(
    ("draft_window", "planned", "told"),
    [(None, None, "24 tokens in 2 of 4 layers: no block is freed early"), (40, 40, "24 and 40 tokens in all layers")],
)
def test_blocks_are_freed_behind_the_windows_of_both_models(
    draft_window: int | None, planned: int | None, told: str, tmp_path: Path
) -> None:
    for name, window in (("target", 24), ("draft", draft_window)):
        (tmp_path / name).mkdir()
        write_zero_model(tmp_path / name, "Mistral", "float32", sliding_window=window)
    options = EngineOptions(str(tmp_path / "target"), spec_model=str(tmp_path / "draft"))
    target = read_model(options.model)
    plan = plan_memory(target, this_machine(200 * MIB), options, draft=read_draft_model(target, options))
    assert plan.cache.sliding_window == planned
    assert plan.windows.startswith(told)
    assert not not_servable_yet(target, this_machine(200 * MIB), options)


def test_draft_model_that_cannot_be_served_is_named() -> None:
    options = EngineOptions(spec_model="LLaMA-7B")
    (reason,) = not_servable_yet(read_model("LLaMA-13B"), HARDWARE["H100"], options)
    assert reason == "a draft model is not supported yet on device cuda"


def test_quantized_weights_leave_more_to_the_cache() -> None:
    hardware, options = this_machine(40 * 2**30), EngineOptions(max_num_seqs=64)
    plain = plan_memory(read_model("LLaMA-7B"), hardware, options)
    model = read_model("LLaMA-7B", asked=QuantizationOptions("int4"))
    found = plan_memory(model, hardware, options)
    assert plain.quantization == ""
    assert found.quantization.startswith("int4: int4 weights in groups of 128, int8 activations in groups of 128")
    assert found.weight_bytes < 0.2 * plain.weight_bytes, "of float32, which float16 is on a CPU"
    assert found.cache.num_blocks > plain.cache.num_blocks
    for each in (hardware, HARDWARE["A100-40GB"]):
        assert not not_servable_yet(model, each, options)


def test_gpu_gives_the_cache_what_weights_and_workspaces_leave() -> None:
    plan = plan_memory(read_model("OPT-13B"), HARDWARE["A100-40GB"], EngineOptions(max_num_seqs=64))
    left = int(0.9 * 40 * 2**30) - plan.weight_bytes - plan.workspace_bytes
    assert 0 <= left - plan.kv_cache_bytes < 16 * plan.kv_bytes_per_token
    assert plan.cache.num_blocks * 16 == pytest.approx(15_700, rel=0.05), "table 1 of the paper"
    assert plan.num_fitting[2048] == plan.cache.num_blocks // 128
    assert plan.binds == "KV cache: 7 requests of 2048 tokens fit, max_num_seqs is 64"


@pytest.mark.parametrize(("num_devices", "kv_heads"), [(1, 8), (4, 2), (8, 1), (16, 1), (64, 1)])
def test_devices_share_kv_heads_down_to_one(num_devices: int, kv_heads: int) -> None:
    hardware = replace(HARDWARE["H200"], memory_bytes=1e12)
    plan = plan_memory(read_model("Llama-3.1-70B"), hardware, EngineOptions(), num_devices=num_devices)
    assert plan.kv_bytes_per_token == 2 * 80 * kv_heads * 128 * 2


def test_smaller_kv_dtype_holds_more() -> None:
    model, hardware = read_model("Llama-3.1-8B"), HARDWARE["A100-40GB"]
    of_16_bits = plan_memory(model, hardware, EngineOptions()).cache.num_blocks
    shares = {"fp8": 2.0, "int8_per_token_head": 256 / 132, "fp8_per_token_head": 256 / 132}
    for name, share in shares.items():
        plan = plan_memory(model, hardware, EngineOptions(kv_cache_dtype=name))  # type: ignore[arg-type]
        assert plan.cache.num_blocks == pytest.approx(share * of_16_bits, abs=1)
        assert plan.kv_cache_dtype == name


def test_seats_bind_where_memory_does_not() -> None:
    plan = plan_memory(read_model("OPT-13B"), HARDWARE["H200"], EngineOptions(max_num_seqs=4))
    assert plan.binds == "max_num_seqs: 4 requests of 2048 tokens fit"


def test_context_that_does_not_fit_is_cut() -> None:
    plan = plan_memory(read_model("Llama-3.1-8B"), replace(HARDWARE["A100-40GB"], memory_bytes=20e9), EngineOptions())
    assert plan.scheduler.max_model_len < 131_072
    assert plan.binds.startswith(f"KV cache: {plan.scheduler.max_model_len} tokens are the longest request")


def test_model_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"OPT-175B does not fit: weights of \d+ bytes .* on each of 2 devices"):
        plan_memory(read_model("OPT-175B"), HARDWARE["A100-80GB"], EngineOptions(), num_devices=2)


def test_engines_of_a_machine_have_the_weights_each_and_share_the_rest() -> None:
    model, machine = read_model("OPT-13B"), Hardware("a machine", 128 << 30, 1.0, 1.0, device="cpu")
    options = EngineOptions(max_num_seqs=4096)
    alone, shared = (plan_memory(model, machine, replace(options, data_parallel_size=number)) for number in (1, 2))
    each = shared.weight_bytes + shared.workspace_bytes
    assert (shared.num_engines, shared.weight_bytes) == (2, alone.weight_bytes)
    block_bytes = shared.cache.block_size * shared.kv_bytes_per_token
    assert shared.cache.num_blocks == int(((128 << 30) - 2 * each) * 0.4) // 2 // block_bytes
    exact = plan_memory(model, machine, EngineOptions(num_kv_blocks=1000, data_parallel_size=2))
    assert exact.cache.num_blocks == 500
    with pytest.raises(ConfigError, match="for each of 5 engines"):
        plan_memory(model, machine, EngineOptions(data_parallel_size=5))
    with pytest.raises(ConfigError, match="KV caches of 2 engines take"):
        plan_memory(model, machine, EngineOptions(kv_cache_memory="60GiB", data_parallel_size=2))
    card = HARDWARE["A100-80GB"]
    reasons = not_servable_yet(model, card, EngineOptions(data_parallel_size=2))
    assert reasons == ["data_parallel_size 2 is not supported yet on device cuda"]


def test_first_gpu_has_the_most_heads() -> None:
    model, card = read_model("OPT-13B"), HARDWARE["H200"]
    found = plan_memory(model, card, EngineOptions(), num_devices=3)
    assert found.kv_bytes_per_token == 2 * 40 * 14 * 128 * 2  # a model of 40 heads
    with pytest.raises(ConfigError, match="tensor_parallel_size 41 is above the model's 40 attention heads"):
        plan_memory(model, card, EngineOptions(), num_devices=41)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (6, 2), (9, 3), (7, 1)])
def test_any_number_of_devices_is_planned_that_the_engine_serves(
    num_heads: int, num_kv_heads: int, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "hidden_size": 16 * num_heads}
    model = read_model(str(write_zero_model(tmp_path, "Llama", "float32", **sizes)))
    whole = CostModel(model.spec, HARDWARE["H100"], dtype="float32")
    for number in range(2, num_heads + 2):
        try:
            check_shardable(model.spec, number)  # as the engine does before it starts the ranks
            refusal = ""
        except ConfigError as error:
            refusal = str(error)
        assert (number > num_heads) == bool(refusal)
        for machine in (this_machine(2**30), HARDWARE["H100"]):
            if refusal:
                with pytest.raises(ConfigError, match=refusal):
                    plan_memory(model, machine, EngineOptions(), number)
                continue
            assert plan_memory(model, machine, EngineOptions(), number).cache.num_blocks > 0
        if not refusal:
            found = CostModel(model.spec, HARDWARE["H100"], num_devices=number, dtype="float32")
            assert found.swap_s(1) < whole.swap_s(1) or num_kv_heads == 1


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0\0\0\0\0[1,2]", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}"[:9]])
def test_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model.safetensors: not a safetensors file"):
        stored_parameters(tmp_path)


@pytest.mark.parametrize(
    ("kv_dtype", "num_devices", "named"),
    [
        ("auto", 1, []),
        ("float16", 1, []),
        ("fp8", 1, []),
        ("int8_per_token_head", 1, []),
        ("bfloat16", 1, ["a KV cache of bfloat16"]),
        ("auto", 2, []),
        ("bfloat16", 4, ["a KV cache of bfloat16"]),
    ],
)
def test_plan_that_the_engine_would_refuse_is_marked(kv_dtype: str, num_devices: int, named: list[str]) -> None:
    model, hardware = read_model("OPT-13B"), HARDWARE["A100-80GB"]
    options = EngineOptions(kv_cache_dtype=kv_dtype)  # type: ignore[arg-type]
    reasons = not_servable_yet(model, hardware, options, num_devices)
    assert [reason.partition(" is not supported yet")[0] for reason in reasons] == named
    assert plan_memory(model, hardware, options, num_devices).cache.num_blocks > 0


def test_adapters_on_several_gpus_are_marked(tmp_path: Path) -> None:
    card, options = HARDWARE["A100-80GB"], EngineOptions(enable_lora=True)
    model = read_model(str(write_zero_model(tmp_path, "Mixtral", "bfloat16")))
    assert plan_memory(model, card, options, 2).has_experts
    reasons = not_servable_yet(model, card, options, 2)
    assert reasons == ["enable_lora is not supported yet with tensor_parallel_size 2 on device cuda"]


def test_cpu_serves_a_quantized_cache() -> None:
    options = EngineOptions(kv_cache_dtype="int8_per_token_head")
    assert not_servable_yet(read_model("OPT-13B"), this_machine(10**12), options) == []
