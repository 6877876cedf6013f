"""Machines are found by name or read from a file; models and the paper's set-ups by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.errors import ConfigError, ModelError
from quire.model.config import num_parameters
from quire_lab.sim.footprint import kv_bytes_per_token
from quire_lab.sim.hardware import HARDWARE, CurvePoint, Hardware, read_hardware, write_hardware
from quire_lab.sim.models import SET_UPS, read_model, set_up


def test_written_hardware_is_read(tmp_path: Path) -> None:
    measured = replace(HARDWARE["H100"], name="mine", curve=(CurvePoint(1, 1e-9), CurvePoint(8, 2e-9)))
    write_hardware(tmp_path / "mine.json", measured)
    assert read_hardware(str(tmp_path / "mine.json")) == measured


def test_known_hardware_goes_by_name() -> None:
    assert read_hardware("A100-40GB").memory_bytes == 40 * 2**30
    with pytest.raises(ConfigError, match=r"hardware must be one of A100-40GB, .*, or a JSON file, got 'A99'"):
        read_hardware("A99")


@pytest.mark.parametrize("content", ["{", "{}", '{"name": "x", "memory_bytes": 1, "bytes_per_s": 0, "flops_per_s": 1}'])
def test_bad_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError, match=r"bad.json|bytes_per_s must be above 0"):
        read_hardware(str(tmp_path / "bad.json"))


def test_time_must_not_run_backwards() -> None:
    with pytest.raises(ConfigError, match="hardware x: step_s must be at least 0 seconds"):
        Hardware("x", 1, 1, 1, step_s=-0.01)


def test_curve_must_ascend() -> None:
    with pytest.raises(ConfigError, match="the curve must ascend"):
        Hardware("x", 1, 1, 1, curve=(CurvePoint(8, 1e-9), CurvePoint(1, 1e-9)))


@pytest.mark.parametrize(("name", "billions"), [("OPT-13B", 12.9), ("OPT-66B", 65.7), ("OPT-175B", 174.6)])
def test_models_have_the_papers_sizes(name: str, billions: float) -> None:
    model = read_model(name)
    assert (model.folder, model.dtype) == (None, "float16")
    assert num_parameters(model.spec) / 1e9 == pytest.approx(billions, rel=0.01)


def test_kv_bytes_are_the_papers() -> None:
    assert kv_bytes_per_token(read_model("OPT-13B").spec, 2) == 800 * 1024
    assert kv_bytes_per_token(read_model("Llama-3.1-8B").spec, 2) == 128 * 1024


def test_set_ups_name_what_there_is() -> None:
    for name, found in SET_UPS.items():
        assert found.model == name
        assert found.cost_model().hardware.step_s == 0.013
        assert found.cost_model().hardware.sequence_s == 0.0003
    with pytest.raises(ConfigError, match="the paper has no set-up for 'GPT-5', only for OPT-13B"):
        set_up("GPT-5")


def test_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json"):
        read_model(str(tmp_path))
