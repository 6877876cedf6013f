"""Notebooks show outputs and the cache as HTML, and a model's text as text."""

import re
from dataclasses import replace

from quire import CompletionOutput, KVStats, RequestMetrics, RequestOutput
from quire.core.displays import MAX_CHARS

STATS = KVStats(
    block_size=16, total_blocks=64, used_blocks=8, cached_blocks=4, free_blocks=52, shared_blocks=2, num_sequences=3,
    tail_waste_slots=16, prefix_queries_tokens=200, prefix_hits_tokens=50,
)  # fmt: skip
OUTPUT = RequestOutput(
    "0", "a <b>", [5, 6], [CompletionOutput(0, "<script>alert(1)</script>&", [7, 8], finish_reason="stop")], True,
    metrics=RequestMetrics(arrival_s=1.0, first_token_s=1.5, finished_s=2.0),
)  # fmt: skip


def words(html: str) -> str:
    return re.sub("<[^>]*>", " ", html)


def test_text_of_a_model_is_no_html() -> None:
    html = OUTPUT._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in html
    assert "a &lt;b&gt;" in html
    assert "<script" not in html
    assert "first token after 0.500 s" in html
    assert "2 output tokens, 2.0 per second" in html


def test_outputs_without_text_or_an_end_are_shown() -> None:
    bare = RequestOutput("0", None, [5, 6, 7], [CompletionOutput(0, "", [7, 8]), CompletionOutput(1, "", [])], False)
    said = words(bare._repr_html_())
    assert "3 token ids" in said
    assert "token ids [7, 8]" in said
    assert "answer 1 · 0 tokens · not finished" in said
    long = replace(OUTPUT, prompt="x" * (MAX_CHARS + 7))
    assert "... 7 more characters" in long._repr_html_()


def test_cache_is_a_bar_and_a_table() -> None:
    html = STATS._repr_html_()
    parts = re.findall(r"title='([a-z ]+)' style='flex:(\d+)", html)
    assert parts == [("in use", "8"), ("cached", "4"), ("free", "52")]
    said = words(html)
    assert "50 (25%)" in said
    assert "12.5%" in said
    assert "swap" not in said
    assert "3 of 9" in words(replace(STATS, swap_total_blocks=9, swap_used_blocks=3)._repr_html_())
