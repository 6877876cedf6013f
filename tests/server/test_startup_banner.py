"""What a server says when it answers."""

import io
import os
from contextlib import suppress

import pytest
from msgspec import structs
from typing_extensions import Buffer

from quire.core.host_limits import Cpus, Memory
from quire.engine.messages import Ready
from quire.scheduling.limits import AdmissionLimits
from quire.server.startup_banner import host_rows, print_banner


def ready(num_blocks: int, max_model_len: int, num_swap_blocks: int = 0) -> Ready:
    limits = AdmissionLimits(num_blocks, block_size=16, max_num_seqs=8, max_model_len=max_model_len)
    return Ready(limits, 64, 100, frozenset({0}), "bfloat16", "cpu", 5_000_000, 10 << 20, 1024, num_swap_blocks)


def table(
    capsys: pytest.CaptureFixture[str],
    *,
    num_blocks: int,
    max_model_len: int,
    num_swap_blocks: int = 0,
    name: str = "tiny",
) -> str:
    print_banner(name, "http://host:1", ready(num_blocks, max_model_len, num_swap_blocks))
    return " ".join(capsys.readouterr().out.split())


def test_table_counts_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    shown = table(capsys, num_blocks=100, max_model_len=300)
    assert "weights 10.0 MiB, 5,000,000 parameters of bfloat16" in shown
    assert "KV cache 100 blocks of 16: 1,600 tokens, 1.6 MiB" in shown
    assert "swap none" in shown
    assert "longest request 300 tokens" in shown
    assert "of that length 5 at once" in shown  # 19 blocks each


def test_table_names_the_dtype_of_a_quantized_cache(capsys: pytest.CaptureFixture[str]) -> None:
    print_banner("tiny", "http://host:1", structs.replace(ready(1, 16), kv_cache_dtype="int8_per_token_head"))
    assert "16 tokens, 16.0 KiB in int8_per_token_head" in " ".join(capsys.readouterr().out.split())


def test_table_names_the_quantization(capsys: pytest.CaptureFixture[str]) -> None:
    assert "quantization" not in table(capsys, num_blocks=1, max_model_len=16)
    quantized = structs.replace(ready(1, 16), quantization="int8: int8 weights")
    print_banner("tiny", "http://host:1", quantized)
    assert "quantization int8: int8 weights" in " ".join(capsys.readouterr().out.split())


def test_table_tells_of_the_swap_space(capsys: pytest.CaptureFixture[str]) -> None:
    shown = table(capsys, num_blocks=1, max_model_len=16, num_swap_blocks=200)
    assert "swap 200 blocks of 16: 3,200 tokens, 3.1 MiB" in shown


def test_no_line_of_a_log_comes_between() -> None:
    class Pieces(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, piece: Buffer) -> int:
            written.append(bytes(piece))
            return len(written[-1])

    written: list[bytes] = []
    print_banner("tiny", "http://host:1", ready(1, 16), io.TextIOWrapper(Pieces(), write_through=True))
    assert [piece.endswith(b"Quire is serving tiny on http://host:1\n") for piece in written] == [True]


def test_table_tells_of_a_missing_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    print_banner("tiny", "http://host:1", ready(1, 16), has_tokenizer=False)
    assert "tokenizer none: prompts must be token ids" in " ".join(capsys.readouterr().out.split())
    assert "tokenizer" not in table(capsys, num_blocks=1, max_model_len=16)


def test_ready_line_is_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert table(capsys, num_blocks=1, max_model_len=16).endswith(" Quire is serving tiny on http://host:1")


def test_stdout_that_nobody_reads_is_no_reason_to_fail() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="ascii", closefd=False) as stdout:
        print_banner("tïny", "http://host:1", ready(1, 16), stdout)
        with suppress(BrokenPipeError):
            stdout.close()
    os.close(writing)


def test_no_more_fit_than_may_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "of that length 8 at once" in table(capsys, num_blocks=100, max_model_len=16)


def test_name_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model a[bold]b/:smile:" in table(capsys, num_blocks=1, max_model_len=16, name="a[bold]b/:smile:")


def test_stdout_on_a_full_device_is_no_reason_to_fail() -> None:
    with suppress(OSError), open("/dev/full", "w", encoding="utf-8") as stdout:
        print_banner("tiny", "http://host:1", ready(1, 16), stdout)
        told = True
    assert told, "nothing was raised before the stream was closed"


def test_table_tells_what_a_container_leaves() -> None:
    rows = host_rows(Cpus(2, 64, "cgroup"), Memory(3 << 30, 4 << 30))
    assert rows == [("CPUs", "2 of 64 (cgroup)"), ("memory", "3.0 GiB free of a limit of 4.0 GiB (cgroup)")]
    assert host_rows(Cpus(8, 8, ""), Memory(3 << 30, None)) == [("CPUs", "8")]
