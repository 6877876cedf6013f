"""Every name of vLLM has a row, and a row's argument sets an option, has no effect, or is refused."""

import logging
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire import LLM
from quire.core.errors import ConfigError
from quire.core.options import declared_options
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions
from quire_vllm.translation import ROWS, engine_settings, is_neutral, meaning
from quire_vllm.values import swap_bytes, whole_number
from vllm_tables import PAGE

ENGINE_OPTIONS = {option.name for option in declared_options(EngineOptions)}
SERVER_OPTIONS = {option.name for option in declared_options(ServerOptions)}
# Fields of vLLM's `EngineArgs` and `AsyncEngineArgs`, further flags of its `serve`, and other spellings of flags.
NAMES = [line.split() for line in Path(__file__).with_name("names_of_vllm_0_33.txt").read_text().splitlines()]
ENGINE_ARGUMENTS = [names[0] for kind, *names in NAMES if kind == "argument"]
OTHER_FLAGS = [names[0] for kind, *names in NAMES if kind == "flag"]
SPELLINGS = {names[0]: names[1] for kind, *names in NAMES if kind == "spelling"}


def settings(**given: object) -> dict[str, object]:
    return engine_settings(given, ENGINE_OPTIONS)


def test_every_argument_of_vllm_has_a_row_of_an_engine() -> None:
    assert [name for name in ENGINE_ARGUMENTS if name not in ROWS] == []
    assert [name for name in ENGINE_ARGUMENTS if not ROWS[name].is_engine] == ["enable_log_requests"]


def test_every_flag_of_vllm_has_a_row() -> None:
    flags = {row.flag for row in ROWS.values()}
    assert [flag for flag in OTHER_FLAGS if flag not in flags] == []
    assert {name: row.flag for row in ROWS.values() for name in row.flags if name != "-O"} == SPELLINGS


def test_rows_are_of_vllm_or_of_a_version_before() -> None:
    known = {*ENGINE_ARGUMENTS, *(flag[2:].replace("-", "_") for flag in OTHER_FLAGS)}
    assert {name for name, row in ROWS.items() if row.is_current} == known


def test_rows_name_options_that_there_are() -> None:
    assert [row.name for row in ROWS.values() if row.own and row.own not in ENGINE_OPTIONS | SERVER_OPTIONS] == []
    same = {row.name for row in ROWS.values() if row.does == "same"}
    assert same - ENGINE_OPTIONS - SERVER_OPTIONS == {"config"}
    assert [row.name for row in ROWS.values() if not row.sentence and row.does in {"accepted", "refused"}] == []


def test_page_has_the_tables_of_the_rows() -> None:
    page = PAGE.path.read_text(encoding="utf-8")
    assert PAGE.filled(page) == page, "run python tools/vllm_tables.py"
    assert [row.flag for row in ROWS.values() if f"`{row.flag}`" not in page] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"max_model_len": -1}, {}),
        ({"max_model_len": "auto"}, {}),
        ({"max_model_len": "32k"}, {"max_model_len": 32000}),
        ({"max_model_len": "32K"}, {"max_model_len": 32768}),
        ({"max_model_len": 40}, {"max_model_len": 40}),
        ({"num_gpu_blocks_override": 7}, {"num_kv_blocks": 7}),
        ({"kv_cache_memory_bytes": 1 << 20}, {"kv_cache_memory": 1 << 20}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"kv_cache_dtype": "fp8_ds_mla"}, {"kv_cache_dtype": "fp8_per_token_head"}),
        ({"swap_space": 4}, {"swap_space": "4GiB"}),
        ({"swap_space": 0}, {"swap_space": 0}),
        ({"swap_space": 1 << 20}, {"swap_space": 1 << 20}),
        ({"swap_space": "512MiB"}, {"swap_space": "512MiB"}),
        ({"seed": None, "block_size": None, "quantization": None}, {}),
        ({"gpu_memory_utilization": 0.5, "enable_prefix_caching": False},
         {"gpu_memory_utilization": 0.5, "enable_prefix_caching": False}),
        ({"memory_policy": "paged"}, {"memory_policy": "paged"}),
        ({"task": "embed"}, {"runner": "pooling"}),
        ({"task": "score"}, {"runner": "pooling"}),
        ({"task": "generate"}, {"runner": "generate"}),
        ({"task": "auto", "convert": "none"}, {}),
        ({"runner": "pooling", "convert": "embed"}, {"runner": "pooling"}),
        ({"attention_backend": "TRITON_ATTN"}, {"attention_backend": "auto"}),
        ({"attention_backend": SimpleNamespace(name="TRITON_ATTN")}, {"attention_backend": "auto"}),
        ({"attention_backend": "cuda"}, {"attention_backend": "cuda"}),
        ({"cudagraph_capture_sizes": [1, 2]}, {"cudagraph_capture_sizes": [1, 2]}),
        ({"cuda_graph_sizes": [1, 2]}, {"cudagraph_capture_sizes": (1, 2)}),
        ({"compilation_config": {"cudagraph_capture_sizes": [3]}}, {"cudagraph_capture_sizes": (3,)}),
        ({"compilation_config": {"max_cudagraph_capture_size": 8}}, {"max_cudagraph_capture_size": 8}),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"enforce_eager": True}),
        ({"compilation_config": 3}, {}),
        ({"load_format": "safetensors"}, {"load_format": "auto"}),
        ({"load_format": "dummy"}, {"load_format": "dummy"}),
    ],
    ids=str,
)  # fmt: skip
def test_argument_that_is_supported_sets_an_option(given: dict[str, object], expected: dict[str, object]) -> None:
    assert settings(**given) == expected


def test_flashinfer_of_vllm_is_quires_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(attention_backend="FLASHINFER") == {}
    monkeypatch.setattr("quire_vllm.values.find_spec", lambda name: object())
    assert settings(attention_backend="FLASHINFER") == {"attention_backend": "flashinfer"}
    assert settings(attention_backend="FLASH_ATTN") == {}


ACCEPTED: dict[str, object] = {
    "cudagraph_metrics": True, "trust_remote_code": True, "disable_log_stats": True, "tokenizer_mode": "auto",
    "async_scheduling": False, "disable_custom_all_reduce": True,
    "max_seq_len_to_capture": 8192, "compilation_config": {"mode": 3}, "hf_token": None, "enable_chunked_prefill": True,
    "served_model_name": "name", "cpu_offload_gb": 0, "model_class_overrides": {}, "pipeline_parallel_size": 1,
    "limit_mm_per_prompt": {"image": 0}, "attention_backend": "FLASH_ATTN",
    "reasoning_parser": "qwen3",
}  # fmt: skip


def test_argument_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quire"):
        assert settings(**ACCEPTED) == {}
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" has no effect: ")[0] for line in lines] == list(ACCEPTED)
    assert "trust_remote_code has no effect: no code of a model's folder is ever run" in lines


REFUSED: dict[str, object] = {
    "pipeline_parallel_size": 2, "default_mm_loras": {"a": "b"}, "watermark_config": {"a": 1},
    "load_format": "pt", "tokenizer_mode": "mistral", "model_class_overrides": {"a": 1}, "cpu_offload_gb": 4.0,
    "logits_processors": ["a.b"], "quantization_config": {"linear": "int8"}, "rope_scaling": {"factor": 2},
    "worker_cls": object, "logprobs_mode": "raw_logits",
    "task": "classify", "convert": "reward", "pooler_config": {"task": "token_embed"},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_argument_that_is_not_supported_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}.* is not supported: .+"):
        settings(**{name: REFUSED[name]})


def test_refusal_tells_the_value_but_no_token() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2 is not"):
        settings(pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"^hf_token is not supported: .*HF_TOKEN"):
        settings(hf_token="secret")
    with pytest.raises(ConfigError) as long:
        settings(model_class_overrides={"name": "long" * 1000})
    assert len(str(long.value)) < 300


def test_two_names_of_one_option_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_gpu_blocks_override is another name of num_kv_blocks"):
        settings(num_kv_blocks=7, num_gpu_blocks_override=8)


def test_sizes_of_graphs_in_two_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="compilation_config is another name of cudagraph_capture_sizes"):
        settings(cudagraph_capture_sizes=[1, 2], compilation_config={"cudagraph_capture_sizes": [1, 4]})


def test_llm_takes_arguments_of_vllm(demo_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="quire.vllm_arguments"),
        LLM(demo_model, num_gpu_blocks_override=40, dtype="float", max_model_len=-1, **ACCEPTED) as llm,
    ):
        (output,) = llm.generate("def f(", use_tqdm=False)
        assert output.outputs[0].token_ids
        assert llm.kv_stats().total_blocks == 40
    assert sum("has no effect" in record.getMessage() for record in caplog.records) == len(ACCEPTED)


def test_llm_refuses_what_is_not_supported_before_it_loads() -> None:
    with pytest.raises(ConfigError, match="lora_dtype 'float16' is not supported"):
        LLM("no/such/model", lora_dtype="float16")
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2 is not supported"):
        LLM("no/such/model", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="dtype must be one of"):
        LLM("no/such/model", dtype="int3")


def test_unknown_argument_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="enforce_eagr"):
        LLM(enforce_eagr=True)
    with pytest.raises(TypeError, match="uvicorn_log_level"):  # for servers alone
        LLM(uvicorn_log_level="info")


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("-1", -1), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), (" 2M ", 2 << 20)]
)
def test_counts_may_have_a_suffix(text: str, number: int) -> None:
    assert whole_number(text, "x") == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1kk", "0x10", "1e3", "9" * 40])
def test_count_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^x must be an integer"):
        whole_number(text, "x")


def test_swap_space_is_in_gib_only_without_a_unit() -> None:
    assert [swap_bytes(given, "x") for given in ("4", 0.5, "1025", None)] == ["4GiB", "0.5GiB", "1025", None]


@pytest.mark.parametrize(
    ("name", "text"),
    [("pipeline_parallel_size", "two"), ("cpu_offload_gb", "much"), ("model_class_overrides", "{"),
     ("cudagraph_metrics", "perhaps")],
)  # fmt: skip
def test_text_of_another_type_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--flag must be"):
        meaning(ROWS[name], text, "--flag", ())


def test_true_and_one_are_told_apart() -> None:
    assert not is_neutral(ROWS["pipeline_parallel_size"], True)
    assert is_neutral(ROWS["pipeline_parallel_size"], 1)


def test_options_of_an_engine_are_all_fields() -> None:
    assert {field.name for field in fields(EngineOptions)} == ENGINE_OPTIONS
