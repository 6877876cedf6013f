"""Sources of which avx512_vnni has the instructions of avx512, so that `make test` runs their tests for one of both."""

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
WITHOUT_PRODUCTS_OF_BYTES = ("linear", "elementwise", "kv_write", "sampling", "short_conv", "delta_net", "mamba")


def read_with_includes(name: str, seen: set[str]) -> str:
    if name in seen:
        return ""
    seen.add(name)
    text = (CSRC / name).read_text()
    return text + "".join(read_with_includes(each, seen) for each in re.findall(r'#include "(.*?)"', text))


def test_sources_whose_tests_leave_out_avx512_vnni_look_at_no_macro_of_it() -> None:
    assert "__AVX512VNNI__" in read_with_includes("quantized_linear.cpp", set())
    for name in WITHOUT_PRODUCTS_OF_BYTES:
        assert "VNNI" not in read_with_includes(f"{name}.cpp", set()), name
