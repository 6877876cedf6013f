"""What a server shows when it has started."""

import pytest

from quire.engine.wire import Ready
from quire.scheduling.limits import AdmissionLimits
from quire.server.startup_table import print_table


def table(capsys: pytest.CaptureFixture[str], *, num_blocks: int, max_model_len: int, name: str = "tiny") -> str:
    limits = AdmissionLimits(num_blocks, block_size=16, max_num_seqs=8, max_model_len=max_model_len)
    ready = Ready(limits, 64, 100, frozenset({0}), "bfloat16", "cpu", 5_000_000, 10 << 20, 1024)
    print_table(name, ready)
    return " ".join(capsys.readouterr().out.split())


def test_table_counts_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    shown = table(capsys, num_blocks=100, max_model_len=300)
    assert "weights 10.0 MiB, 5,000,000 parameters of bfloat16" in shown
    assert "KV cache 100 blocks of 16: 1,600 tokens, 1.6 MiB" in shown
    assert "swap none" in shown
    assert "longest request 300 tokens" in shown
    assert "of that length 5 at once" in shown  # 19 blocks each


def test_no_more_fit_than_may_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "of that length 8 at once" in table(capsys, num_blocks=100, max_model_len=16)


def test_name_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model a[bold]b/:smile:" in table(capsys, num_blocks=1, max_model_len=16, name="a[bold]b/:smile:")
