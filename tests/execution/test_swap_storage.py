"""The swap space's file: large enough from the start, and gone with its last tensor."""

import os
from pathlib import Path

import pytest
import torch

from quire.core.errors import ConfigError
from quire.execution.swapper import UnlinkedFile, allocate_swap_space
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.reference.back_ends import REFERENCE
from quire.model.kv_cache import ALIGNMENT, KVCache, KVGeometry
from quire.model.loader import load_model
from quire.model.spec import DecoderSpec
from support.on_tensors import tensors

MIB = 1 << 20


def mapped_bytes(folder: Path) -> int:
    """Return how much of this process's memory is mapped from files in a folder that have no name any more."""
    total = 0
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        if str(folder) in line and "(deleted)" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


@pytest.fixture(scope="module")
def spec(demo_model: Path) -> DecoderSpec:
    return load_model(demo_model, back_end=REFERENCE).spec


@pytest.fixture(params=["reference", "auto"])
def back_end(request: pytest.FixtureRequest, spec: DecoderSpec) -> BackEnd:
    return choose_back_end(torch.device("cpu"), request.param, head_dim=spec.head_dim)


def geometry_of(spec: DecoderSpec, back_end: BackEnd, dtype: str) -> KVGeometry:
    return KVGeometry.of(spec, *back_end.cache_layout.stored_dtype(back_end.library.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_space_is_laid_out_as_the_cache_is(
    spec: DecoderSpec, back_end: BackEnd, dtype: str, tmp_path: Path
) -> None:
    geometry = geometry_of(spec, back_end, dtype)
    space = allocate_swap_space(geometry, 5, 16, back_end, str(tmp_path))
    cache = KVCache.allocate(geometry, 5, 16, back_end)
    for ours, theirs in zip(tensors(space.tensors), tensors(cache.tensors), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        assert ours.data_ptr() % ALIGNMENT == 0
        assert not ours.any()
        ours.fill_(1)
    starts = sorted(x.data_ptr() for x in tensors(space.tensors))
    assert starts[-1] - starts[0] < 5 * 16 * geometry.bytes_per_token(16) + 64 * ALIGNMENT


def test_file_has_no_name_and_goes_with_its_last_tensor(spec: DecoderSpec, tmp_path: Path) -> None:
    geometry = geometry_of(spec, REFERENCE, "float32")
    space = allocate_swap_space(geometry, 64, 16, REFERENCE, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert mapped_bytes(tmp_path) >= 64 * 16 * geometry.bytes_per_token(16)
    last = space.values[-1]
    del space
    last.fill_(3)
    assert mapped_bytes(tmp_path) > 0
    del last
    assert mapped_bytes(tmp_path) == 0


def test_room_is_really_taken(tmp_path: Path) -> None:
    before = os.statvfs(tmp_path)
    space = UnlinkedFile(tmp_path, 64 * MIB)
    after = os.statvfs(tmp_path)
    assert (before.f_bfree - after.f_bfree) * after.f_frsize > 32 * MIB, "others may write and delete meanwhile"
    assert len(space.allocate(MIB)) == MIB


def test_disk_too_small_is_refused_with_the_numbers(tmp_path: Path) -> None:
    told = rf"takes {1 << 60} bytes, but only \d+ are free in swap_dir '{tmp_path}'; lower swap_space or"
    with pytest.raises(ConfigError, match=told):
        UnlinkedFile(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"swap_dir '{tmp_path / name}' cannot take a file of 1048576 bytes"):
        UnlinkedFile(tmp_path / name, MIB)
