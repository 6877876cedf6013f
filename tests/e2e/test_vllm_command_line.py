"""A command line of `vllm serve` starts a server of Quire, as it is."""

from pathlib import Path

from support.server import running_server

COMMAND = """
    --trust-remote-code --enforce-eager --dtype half --tensor-parallel-size 1 --gpu-memory-utilization 0.9 -O3
    --max-model-len 1k --max-num-seqs 8 --max-num-batched-tokens 1K --num-gpu-blocks-override 200 --disable-log-stats
    --enable-chunked-prefill --no-enable-prefix-caching --load-format safetensors --tokenizer-mode auto --seed 7
    --disable-log-requests --uvicorn-log-level warning --compilation-config.mode 3 --served-model-name one two
    --limit-mm-per-prompt {"image":0} --enable-prompt-tokens-details --max-num-queued-reqs 5 --swap-space 0
"""


def test_server_starts_and_answers(demo_model: Path) -> None:
    with running_server("--model", str(demo_model), *COMMAND.split(), env={"QUIRE_ASYNC_SCHEDULING": "true"}) as server:
        answer = server.post("/v1/completions", {"model": "two", "prompt": "def f(", "max_tokens": 4}).json()
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("two", 4)
        assert "/v1/completions" not in server.log
        metrics = server.get("/metrics").text
        assert 'quire:kv_blocks{engine="0",state="free"} 200.0' in metrics
        told = [line for line in server.log.splitlines() if line.startswith("quire: ")]
    assert [line.split()[1] for line in told] == [
        "--trust-remote-code", "-O", "--disable-log-stats",
        "--enable-chunked-prefill", "--tokenizer-mode",
        "--uvicorn-log-level", "--enable-prompt-tokens-details",
        "QUIRE_ASYNC_SCHEDULING", "--compilation-config",       # keys one by one come last
    ]  # fmt: skip
