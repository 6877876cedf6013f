"""Every test of a C++ kernel runs on every instruction set that was built and that this machine has."""

from collections.abc import Iterator

import pytest

_kernels = pytest.importorskip("quire.extension._kernels", reason="the C++ kernels were not built")
ISAS = _kernels.usable_isas()


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose the instruction set for the test, and the best one again afterwards."""
    _kernels.use_isa(request.param)
    yield request.param
    _kernels.use_isa(ISAS[0])
