"""Flags of vLLM for `quire serve` and other commands: typed, from the environment, and from files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.speculation import SpeculationConfig
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions
from quire_vllm.flags import _MEANT

Run = Callable[..., Any]
Serve = Callable[[str], tuple[EngineOptions, ServerOptions, list[str]]]
Started = list[tuple[EngineOptions, ServerOptions]]
# Values of flags that no line has set, where they differ from those of `EngineOptions`.
DEFAULTS: dict[str, Any] = {"max_num_seqs": 256, "itl_target_ms": "500"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return what servers would have been started with; none is."""
    calls: Started = []
    monkeypatch.setattr("quire.cli.serve.start", lambda engine, options, fetch: calls.append((engine, options)))
    return calls


@pytest.fixture
def serve(run: Run, started: Started) -> Serve:
    """Return a function that reads a command line of `quire serve`, and returns its options and the lines it told."""

    def read(line: str) -> tuple[EngineOptions, ServerOptions, list[str]]:
        ran = run("serve", *line.split())
        assert ran.code == 0, ran.err
        engine, options = started.pop()
        return engine, options, ran.err.splitlines()

    return read


def refusal(run: Run, *arguments: str) -> str:
    """Return the message of a command line that is refused, without its frame and line breaks."""
    ran = run(*arguments)
    assert ran.code == 2, ran.err
    return " ".join(ran.err.replace("│", " ").split())


def test_flags_without_effect_are_told_once_each(serve: Serve) -> None:
    engine, options, lines = serve(
        "MODEL --cudagraph-metrics --trust_remote_code --enable-chunked-prefill "
        "--tokenizer-mode=auto -pp 1 --disable-log-stats --enable-prompt-tokens-details "
        "--cudagraph-metrics -O3 -O 2 --hf-token --uvicorn-log-level warning --full-cuda-graph"
    )
    assert (engine, options) == (EngineOptions("MODEL", **DEFAULTS), ServerOptions())
    assert [line.split(" has no effect: ")[0] for line in lines] == [
        f"quire: {flag}"
        for flag in (
            "--cudagraph-metrics", "--trust-remote-code", "--enable-chunked-prefill",
            "--tokenizer-mode", "-pp", "--disable-log-stats", "--enable-prompt-tokens-details", "-O",
            "--hf-token", "--uvicorn-log-level", "--full-cuda-graph",
        )
    ]  # fmt: skip


def test_flags_with_other_names_and_forms_set_options(serve: Serve) -> None:
    engine, options, lines = serve(
        "--model MODEL --num-gpu-blocks-override 12 --dtype half --max-model-len 2k --max-num-batched-tokens=1K "
        "--swap-space 2 --device-memory-utilization 0.5 --kv-cache-memory-bytes 4M --max-num-queued-reqs 9 "
        "--sse-keep-alive-interval 3 --h11-max-header-count 50 --served-model-name a b --api-key one two "
        "--no-enable-prefix-caching -q int8 --load-format=dummy --structured-outputs-config.disable_any_whitespace true"
    )
    assert lines == []
    assert engine == EngineOptions(
        "MODEL", num_kv_blocks=12, dtype="float16", max_model_len=2000, max_num_batched_tokens=1024, max_num_seqs=256,
        itl_target_ms="500", swap_space="2GiB", gpu_memory_utilization=0.5, kv_cache_memory=str(4 << 20),
        enable_prefix_caching=False, quantization="int8", load_format="dummy",
    )  # fmt: skip
    assert options == ServerOptions(
        max_queued_requests=9, stream_keepalive=3, max_headers=50, served_model_name=("a", "b"), api_key=("one", "two"),
        structured_outputs_config='{"disable_any_whitespace": true}',
    )  # fmt: skip


def test_flags_of_traces_logs_and_profiles_set_options(serve: Serve, run: Run) -> None:
    _, options, lines = serve(
        "--otlp-traces-endpoint http://localhost:4318 --collect-detailed-traces model worker --log-level WARNING "
        "--disable-log-requests --profiler-config.profiler torch --profiler-config.torch_profiler_dir profiles"
    )
    assert [line.split()[1] for line in lines] == ["--collect-detailed-traces"]
    assert options == ServerOptions(
        otlp_traces_endpoint="http://localhost:4318", log_level="warning", log_requests=0.0, profile_dir="profiles"
    )
    assert serve("--enable-log-requests")[1] == serve("--no-disable-log-requests")[1] == ServerOptions()
    assert serve("--no-enable-log-requests")[1].log_requests == 0
    refused = refusal(run, "serve", "--profiler-config", '{"profiler": "cuda"}')
    assert "--profiler-config must have torch_profiler_dir, the folder of profiles" in refused


def test_older_switches_of_grammars_are_options_of_their_config(
    serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        flag = f"--guided-decoding-{name}".replace("_", "-")
        assert serve(flag)[1].structured_outputs_config == f'{{"{name}": true}}'
        assert serve(f"{flag}=false")[1].structured_outputs_config == ""
    both = "--guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties"
    joined = '{"disable_any_whitespace": true, "disable_additional_properties": true}'
    assert serve(both)[1].structured_outputs_config == joined
    monkeypatch.setenv("QUIRE_GUIDED_DECODING_DISABLE_ANY_WHITESPACE", "1")
    assert serve(both.split()[1])[1].structured_outputs_config == '{"disable_additional_properties": true, ' + (
        '"disable_any_whitespace": true}'
    )
    told = refusal(run, "serve", *both.split(), "--structured-outputs-config", "{}")
    assert "--structured-outputs-config is given as JSON and by its keys disable_any_whitespace, disable_add" in told
    monkeypatch.delenv("QUIRE_GUIDED_DECODING_DISABLE_ANY_WHITESPACE")
    path = tmp_path / "serve.yaml"
    path.write_text("guided-decoding-disable-any-whitespace: true\n")
    assert serve(f"--config {path}")[1].structured_outputs_config == '{"disable_any_whitespace": true}'


@pytest.mark.parametrize(
    ("line", "sizes", "largest", "is_eager"),
    [
        ("--cudagraph-capture-sizes 1 2 64", (1, 2, 64), None, False),
        ("--cudagraph-capture-sizes 1 2 64 MODEL", (1, 2, 64), None, False),
        ("--cudagraph-capture-sizes=8 --cudagraph_capture_sizes 4", (8, 4), None, False),
        ("--max-cudagraph-capture-size 1K", (), 1024, False),
        ("--cuda-graph-sizes 1 2 4", (1, 2, 4), None, False),
        ("--cuda-graph-sizes 64", (), 64, False),
        ("""-cc {"cudagraph_capture_sizes":[1,2],"max_cudagraph_capture_size":2}""", (1, 2), 2, False),
        ("-cc.cudagraph_capture_sizes+ 1,2", (1, 2), None, False),
        ("--compilation-config.max_cudagraph_capture_size=32", (), 32, False),
        ("-cc.cudagraph_mode NONE", (), None, True),
        ("--enforce-eager", (), None, True),
    ],
)
def test_sizes_of_graphs_are_told_in_vllm_s_forms(
    serve: Serve, tmp_path: Path, line: str, sizes: tuple[int, ...], largest: int | None, is_eager: bool
) -> None:
    engine, _, lines = serve(line)
    assert (engine.cudagraph_capture_sizes, engine.max_cudagraph_capture_size) == (sizes, largest)
    assert engine.enforce_eager == is_eager
    assert lines == []


def test_sizes_of_graphs_come_from_a_file_and_the_environment(
    serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("cudagraph-capture-sizes: [1, 2]\n")
    assert serve(f"--config {path}")[0].cudagraph_capture_sizes == (1, 2)
    path.write_text("compilation-config:\n  cudagraph_capture_sizes: [4, 8]\n  level: 3\n")
    engine, _, lines = serve(f"--config {path}")
    assert engine.cudagraph_capture_sizes == (4, 8)
    assert [line.split(":")[1] for line in lines] == [
        " compilation-config has no effect beyond cudagraph_capture_sizes"
    ]
    monkeypatch.setenv("QUIRE_CUDAGRAPH_CAPTURE_SIZES", "16 32")
    assert serve("MODEL")[0].cudagraph_capture_sizes == (16, 32)
    for line, told in (("a", "integers: .*'a'"), ("0", "from 1 to 8192, got 0")):
        ran = run("serve", "--cudagraph-capture-sizes", line)
        assert ran.code != 0
        assert re.search(f"cudagraph_capture_sizes must be .*{told}", " ".join(ran.err.replace("│", " ").split()))


@pytest.mark.parametrize("length", ["-1", "auto"])
def test_length_may_be_left_to_the_engine(serve: Serve, length: str) -> None:
    assert serve(f"--max-model-len {length}")[0].max_model_len is None


@pytest.mark.parametrize(
    ("line", "model", "names"),
    [
        ("MODEL --served-model-name a b", "MODEL", ("a", "b")),
        ("--served-model-name a b --model MODEL", "MODEL", ("a", "b")),
        ("--served-model-name a MODEL", "MODEL", ("a",)),
        ("--served-model-name a b MODEL --port 1", "MODEL", ("a", "b")),
        ("--served-model-name a --served-model-name b", None, ("a", "b")),
    ],
)
def test_values_behind_one_flag_leave_the_model(
    serve: Serve, line: str, model: str | None, names: tuple[str, ...]
) -> None:
    engine, options, _ = serve(line)
    assert (engine.model, options.served_model_name) == (model, names)


def test_switches_have_a_negative_form(serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_ALLOW_CLIENT_PRIORITY", "1")
    path = tmp_path / "serve.yaml"
    path.write_text("enable-debug: true\n")
    _, options, lines = serve(
        f"--config {path} --no-enable-debug --no-allow-client-priority --no-disable-log-stats --no-enable-prompt-embeds"
    )
    assert options == ServerOptions()
    assert [line.split()[1] for line in lines] == ["--no-disable-log-stats", "--no-enable-prompt-embeds"]


def test_json_may_be_given_key_by_key(serve: Serve, run: Run) -> None:
    _, _, lines = serve("--compilation-config.mode 3 --compilation_config.pass_config.enable_fusion=true -ac.backend X")
    assert [line.split()[1] for line in lines] == ["--compilation-config", "-ac"]
    assert "--watermark-config {'method': 'ngram', 'sizes': ['1', '2'], 'of': {'depth': 2}} is not" in refusal(
        run, "serve", "--watermark-config.method", "ngram", "--watermark-config.sizes+", "1,2",
        "--watermark-config.of.depth", "2",
    )  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "--speculative-config.method suffix --speculative-config.num_speculative_tokens 3",
        """-sc {"method":"suffix","num_speculative_tokens":3}""",
        "--spec-method suffix --spec-tokens 3",
        "--spec-method=suffix --num-speculative-tokens 3",
    ],
)
def test_speculation_is_configured_in_vllm_s_forms(serve: Serve, line: str) -> None:
    engine, _, lines = serve(line)
    assert engine.speculation == SpeculationConfig("suffix", 3)
    assert lines == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-pp 2", "-pp 2 is not supported"),
        ("--pipeline-parallel-size=2", "--pipeline-parallel-size 2 is not supported"),
        ("--enable-prompt-embeds", "--enable-prompt-embeds is not supported: prompts are texts and token ids"),
        ("--numa-bind-nodes 0 1", "--numa-bind-nodes ['0', '1'] is not supported: start the command under numactl"),
        ("--load-format pt", "--load-format 'pt' is not supported: weights are read from"),
        ("--middleware some.module", "no code from outside is run"),
        ("--pipeline-parallel-size two", "--pipeline-parallel-size must be an integer"),
        ("--max-model-len long", "--max-model-len must be an integer such as"),
        ("--revision", "Option '--revision' requires an argument"),
        ("--dtype int3", "Invalid value for '--dtype'"),
        ("--enforce-eagr", "No such option: --enforce-eagr Did you mean --enforce-eager?"),
        ("--max-num-sqs 3", "No such option: --max-num-sqs Did you mean --max-num-seqs?"),
        ("--ctx-size 4096", "No such option: --ctx-size Did you mean --max-model-len?"),
        ("-c 4096", "No such option: -c Did you mean --max-model-len?"),
        ("--cors", "No such option: --cors Did you mean --allowed-origins?"),
        ("-m model", "No such option: -m Did you mean the model's folder, file or name, without a flag?"),
        ("--no-such-flag", "No such option: --no-such-flag"),
        ("--no-port", "No such option: --no-port"),
        ("-x", "No such option: -x"),
        ("--additional-config.a 1 --additional-config.a.b 2", "a has a value already"),
    ],
)
def test_what_is_refused_is_told_with_the_reason(run: Run, started: Started, line: str, words: str) -> None:
    assert words in refusal(run, "serve", *line.split())
    assert started == []


def test_flags_of_other_programs_are_told_as_flags_that_the_command_has(run: Run) -> None:
    known = run("serve", "--help=all").out.replace(",", " ").split()
    assert [meant for meant in _MEANT.values() if meant.startswith("-") and meant.split()[0] not in known] == []
    assert "Did you mean --max-model-len?" in refusal(run, "generate", "--ctx-size", "5")
    assert "--allowed-origins" not in refusal(run, "generate", "--cors")


def test_flags_come_from_the_environment(serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CUDAGRAPH_METRICS", "1")
    monkeypatch.setenv("QUIRE_NUM_GPU_BLOCKS_OVERRIDE", "12")
    monkeypatch.setenv("QUIRE_DTYPE", "float")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "1k")
    engine, _, lines = serve("--max-model-len 2k")
    assert (engine.num_kv_blocks, engine.dtype, engine.max_model_len) == (12, "float32", 2000)
    assert [line.split()[1] for line in lines] == ["QUIRE_CUDAGRAPH_METRICS"]
    monkeypatch.setenv("QUIRE_PIPELINE_PARALLEL_SIZE", "2")
    assert "QUIRE_PIPELINE_PARALLEL_SIZE 2 is not supported" in refusal(run, "serve")
    assert serve("-pp 1")[0].dtype == "float32"  # what is typed wins


def test_flags_come_from_a_file(serve: Serve, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: MODEL\ncudagraph-metrics: true\npipeline-parallel-size: 1\nnum-gpu-blocks-override: 12\ndtype: half\n"
        "max-model-len: 4k\nserved-model-name: [a, b]\ncompilation-config:\n  mode: 3\ndisable_log_stats: null\n"
        "structured-outputs-config:\n  disable_any_whitespace: true\n"
    )
    engine, options, lines = serve(f"--config {path} --max-model-len auto")
    assert (engine.model, engine.num_kv_blocks, engine.dtype, engine.max_model_len) == ("MODEL", 12, "float16", None)
    assert options.served_model_name == ("a", "b")
    assert options.structured_outputs_config == '{"disable_any_whitespace": true}'
    assert [line.split()[1] for line in lines] == [
        "cudagraph-metrics", "pipeline-parallel-size", "compilation-config", "disable-log-stats",
    ]  # fmt: skip
    path.write_text("enable-prompt-embeds: true\n")
    assert "enable-prompt-embeds is not supported" in refusal(run, "serve", "--config", str(path))
    engine, _, _ = serve(f"--config {path} --no-enable-prompt-embeds")
    assert engine == EngineOptions(**DEFAULTS)


def test_repeatable_flag_takes_one_value_from_a_file(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("served-model-name: name\n")
    assert serve(f"--config {path}")[1].served_model_name == ("name",)


def test_help_does_not_have_them(run: Run) -> None:
    offered = run("serve", "--help=all").out
    hidden = ("--cudagraph-metrics", "--pipeline-parallel-size", "--num-gpu-blocks")
    assert [flag for flag in hidden if flag in offered] == []


def test_other_commands_that_load_a_model_know_them(run: Run) -> None:
    ran = run("generate", "no/such/model", "--cudagraph-metrics", "--prompt", "a")
    assert (ran.code, "--cudagraph-metrics has no effect" in ran.err) == (1, True)
    assert "--enable-prompt-embeds is not supported" in refusal(run, "bench", "throughput", "--enable-prompt-embeds")
    assert "No such option: --uds" in refusal(run, "generate", "--uds", "x")
    assert "No such option: --cudagraph-metrics" in refusal(run, "bench", "control-plane", "--cudagraph-metrics")


def test_key_of_vllm_is_taken_where_no_other_is_given(
    serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "do-not-tell")
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\n")
    assert serve("--host 0.0.0.0")[1].api_key == ("do-not-tell",)
    assert serve(f"--config {path}")[1].api_key == ("do-not-tell",)
    path.write_text("api-key: of-file\n")
    assert serve(f"--config {path}")[1].api_key == ("of-file",)
    assert serve("--api-key typed")[1].api_key == ("typed",)
    monkeypatch.setenv("QUIRE_API_KEY", "one two")
    assert serve("")[1].api_key == ("one", "two")
    monkeypatch.delenv("QUIRE_API_KEY")
    assert "do-not-tell" not in run("serve", "--help=all").out
    assert "do-not-tell" not in run("serve", "--port", "-1").err
