"""Packed weights: the same bits as without them, and no file is used that differs from what was written."""

import fcntl
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from quire.core.errors import ConfigError
from quire.engine.formats import read_source
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.cpp.cpp_packing import PACKING_VERSION
from quire.model.checkpoints.packed_file import HEADER_AT, PAGE_BYTES, SUFFIX, PackedFileError, read_packed
from quire.model.decoder import Decoder
from quire.model.loader import load_model
from quire.model.packed_weights import PackedPlace
from quire.model.quantization import QuantizationOptions
from quire.model.resolve import DEMO_MODEL
from support import gguf_files
from support.encoders import write_encoder
from support.fuzz_seeds import fuzz
from support.gguf_blocks import random_blocks
from support.paged_runner import PagedRunner
from support.quantized_folder import gptq, gptq_config, write_pair
from support.random_folder import MIXTURE, write_random_folder
from support.random_model import write_random_model
from support.spoilt_packed import sealed, spoil
from support.zero_model import config_of

TOKENS = [5, 6, 7, 8, 9, 5]
TIED = config_of("Llama", tie_word_embeddings=True)
BLOCKS = TIED | {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip
INT4 = QuantizationOptions("int4", 32)


class Case(NamedTuple):
    """A model, and how it is loaded."""

    write: Callable[[Path], Path]
    dtype: str = "bfloat16"
    asked: QuantizationOptions = QuantizationOptions()


def gguf(default: str) -> Callable[[Path], Path]:
    def write(parent: Path) -> Path:
        folder = write_random_folder(parent / "floats", BLOCKS)
        return gguf_files.convert(folder, parent / "model.gguf", random_blocks({"attn_v.weight": "Q6_K"}, default))

    return write


def encoder(family: str) -> Callable[[Path], Path]:
    return lambda parent: write_encoder(parent / "model", family, end="ForSequenceClassification")


def folder_of(config: dict[str, object]) -> Callable[[Path], Path]:
    return lambda parent: write_random_folder(parent / "model", config)


def random_model(parent: Path) -> Path:
    (parent / "model").mkdir()
    return write_random_model(parent / "model")


def in_any_order(parent: Path) -> Path:
    return write_pair(parent, gptq(4, 32, desc_act=True), gptq_config(4, 32, desc_act=True)).folder


CASES = {
    "float32": Case(random_model, "float32"),
    "bfloat16": Case(random_model),
    "float16": Case(random_model, "float16"),
    "tied": Case(folder_of(TIED)),
    "tied, int8": Case(folder_of(TIED), asked=QuantizationOptions("int8")),
    "int4": Case(random_model, asked=INT4),
    "int4, expanded": Case(random_model, "float32", QuantizationOptions("int4", 32, "bfloat16")),
    "biases and positions": Case(folder_of(config_of("GPT2"))),
    "projected embeddings": Case(folder_of(config_of("OPT, narrow embeddings"))),
    "inputs in any order": Case(in_any_order),
    "experts": Case(folder_of(MIXTURE)),
    "experts, int4": Case(folder_of(MIXTURE), asked=INT4),
    "stored table, minimums": Case(gguf("Q4_K")),
    "stored table, codes": Case(gguf("IQ4_NL"), "float32"),
    "encoder": Case(encoder("Bert"), "float32"),
    "encoder with rotary positions": Case(encoder("ModernBert")),
}  # fmt: skip


@pytest.fixture(scope="module")
def cpp() -> BackEnd:
    return choose_back_end(torch.device("cpu"))


def load(case: Case, path: Path, back_end: BackEnd, place: Path | None = None, *, must_write: bool = False) -> Decoder:
    source = read_source(path)
    return load_model(
        source, dtype=case.dtype, back_end=back_end, quantization=source.quantization(case.asked),
        packed=None if place is None else PackedPlace(place, must_write),
    )  # fmt: skip


def logits(decoder: Decoder) -> torch.Tensor:
    runner = PagedRunner(decoder)
    found = list(runner.step({"a": TOKENS, "b": TOKENS[:3]}).values())
    return torch.cat([*found, runner.step({"a": [4]})["a"]] if decoder.spec.is_causal else found)


def packed_in(folder: Path) -> Path:
    """Return the only file in a folder."""
    (file,) = folder.iterdir()
    assert file.suffix == SUFFIX
    return file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return random_model(tmp_path)


@pytest.fixture
def packed(tmp_path: Path, model: Path, cpp: BackEnd) -> Path:
    """Return the packed file of `model` in bfloat16."""
    load(CASES["bfloat16"], model, cpp, tmp_path / "packed", must_write=True)
    return packed_in(tmp_path / "packed")


@pytest.mark.parametrize("name", CASES)
def test_logits_have_the_bits_of_a_start_without_packed_weights(name: str, tmp_path: Path, cpp: BackEnd) -> None:
    case = CASES[name]
    path = case.write(tmp_path)
    plain, made, read = (load(case, path, cpp, place) for place in (None, *[tmp_path / "packed"] * 2))
    assert torch.equal(logits(made), logits(plain))
    assert torch.equal(logits(read), logits(plain))
    assert (read.num_parameters, read.weight_bytes) == (plain.num_parameters, plain.weight_bytes)
    assert packed_in(tmp_path / "packed").stat().st_size > read.weight_bytes // 2


def test_file_that_fits_is_read_and_not_written(
    packed: Path, model: Path, cpp: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    before = packed.stat()
    load(CASES["bfloat16"], model, cpp, packed.parent)
    after = packed.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert "written" not in caplog.text
    with caplog.at_level("INFO"):
        load(CASES["bfloat16"], model, cpp, packed)  # packed by its own name
    assert f"packed weights of {packed}: read in" in caplog.text


def touched(model: Path) -> None:
    os.utime(model / "model.safetensors")


def other_weights(model: Path) -> None:
    """Change a weight at the end of the file, where no digest of the source looks; the time of change tells."""
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)


def other_config(model: Path) -> None:
    """Change config.json, but neither its length nor its time of change."""
    file, status = model / "config.json", (model / "config.json").stat()
    text = file.read_text()
    file.write_text(text.replace("1e-06", "1e-05"))
    assert file.read_text() != text
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def one_more_file(model: Path) -> None:
    (model / "generation_config.json").write_text("{}")


@pytest.mark.parametrize("change", [touched, other_weights, other_config, one_more_file])
def test_file_of_other_sources_is_packed_again(
    change: Callable[[Path], None], packed: Path, model: Path, cpp: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    change(model)
    found = load(CASES["bfloat16"], model, cpp, packed.parent)
    assert f"{packed}: made with files" in caplog.text
    caplog.clear()
    assert torch.equal(logits(found), logits(load(CASES["bfloat16"], model, cpp)))
    load(CASES["bfloat16"], model, cpp, packed_in(packed.parent))
    assert not caplog.text


def test_file_of_other_settings_is_packed_again(
    packed: Path, model: Path, cpp: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    load(CASES["int4"], model, cpp, packed)
    assert f"{packed}: made with settings method none, not int4" in caplog.text
    found = load(CASES["float32"], model, cpp, packed)
    assert f"{packed}: made with settings dtype bfloat16, not float32" in caplog.text
    assert torch.equal(logits(found), logits(load(CASES["float32"], model, cpp)))


# Digests of the demo model's arrays by PACKING_VERSION: a change that makes other bytes of the same weights raises it.
PACKED_BYTES = {
    2: {
        "float32": "6468a7fa2ccdf4dd", "int8": "81c63fb258e34151", "int4": "bd2d37183f23d7f1",
        "int4, expanded": "3e2135e8d0efc5a5",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["float32", "int8", "int4", "int4, expanded"])
def test_other_bytes_have_another_packing_version(name: str, tmp_path: Path, cpp: BackEnd) -> None:
    asked = {"int8": QuantizationOptions("int8")} | {each: CASES[each].asked for each in CASES}
    load(Case(random_model, "float32", asked[name]), DEMO_MODEL, cpp, tmp_path, must_write=True)
    data = parts_of(packed_in(tmp_path))[1]
    assert hashlib.blake2b(data, digest_size=8).hexdigest() == PACKED_BYTES[PACKING_VERSION][name]


def test_file_of_another_packing_is_packed_again(
    packed: Path, model: Path, cpp: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    header, data = parts_of(packed)
    header["identity"]["packing"] = 0
    packed.write_bytes(sealed(json.dumps(header).encode(), data))
    load(CASES["bfloat16"], model, cpp, packed)
    assert f"{packed}: made with packing 0, not" in caplog.text


def test_settings_have_files_of_their_own_in_a_folder(packed: Path, model: Path, cpp: BackEnd) -> None:
    load(CASES["int4"], model, cpp, packed.parent)
    assert len(list(packed.parent.iterdir())) == 2


def parts_of(packed: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    """Return the header of a packed file, and the bytes behind it."""
    content = packed.read_bytes()
    length = int.from_bytes(content[8:16], "little")
    end = HEADER_AT + length
    return json.loads(content[HEADER_AT:end]), content[end + -end % PAGE_BYTES :]


def test_byte_changed_in_any_record_is_found(packed: Path) -> None:
    whole, (header, data) = packed.read_bytes(), parts_of(packed)
    place = len(whole) - len(data)
    records = read_packed(packed, header["identity"]).records
    assert len(records) > 10
    for name, record in records.items():
        for part, array in record.arrays.items():
            changed = bytearray(whole)
            changed[place + array.nbytes // 2] ^= 1
            packed.write_bytes(changed)
            with pytest.raises(PackedFileError, match=rf"{name} \({part}\) is damaged".replace("+", r"\+")):
                read_packed(packed, header["identity"])
            packed.write_bytes(whole[: place + array.nbytes // 2])
            with pytest.raises(PackedFileError, match="bytes, and the header describes"):
                read_packed(packed, header["identity"])
            place += -(-array.nbytes // 64) * 64


def test_change_of_a_file_that_is_in_use_has_no_effect(packed: Path, model: Path, cpp: BackEnd) -> None:
    found = load(CASES["bfloat16"], model, cpp, packed)
    before = logits(found)
    with packed.open("r+b") as file:
        file.write(b"x" * 5000)
        file.truncate(6000)
    assert torch.equal(logits(found), before)


def test_folder_that_cannot_be_written_costs_a_warning(
    model: Path, cpp: BackEnd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    load(CASES["bfloat16"], model, cpp, tmp_path / "file" / "packed")
    assert "packed weights of the next start cannot be written" in caplog.text
    with pytest.raises(OSError, match="Not a directory"):
        load(CASES["bfloat16"], model, cpp, tmp_path / "file" / "packed", must_write=True)
    with pytest.raises(ConfigError, match=r"packed_weights .* a name that ends in \.quire"):
        load(CASES["bfloat16"], model, cpp, tmp_path / "file")


def test_folder_in_which_another_process_writes_is_left_to_it(model: Path, cpp: BackEnd, tmp_path: Path) -> None:
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    load(CASES["bfloat16"], model, cpp, tmp_path / "x.quire")
    os.close(lock)
    assert not (tmp_path / "x.quire").exists()
    load(CASES["bfloat16"], model, cpp, tmp_path / "x.quire")
    assert {each.name for each in tmp_path.iterdir()} == {"model", "x.quire"}


FUZZED = ("int4", "biases and positions", "stored table, codes")


@pytest.fixture(params=FUZZED)
def fuzzed(request: pytest.FixtureRequest, tmp_path: Path, cpp: BackEnd) -> "Spoilt":
    case = CASES[request.param]
    path = case.write(tmp_path)
    load(case, path, cpp, tmp_path / "whole.quire", must_write=True)
    return Spoilt(case, path, tmp_path / "whole.quire", cpp, logits(load(case, path, cpp)))


class Spoilt(NamedTuple):
    """A model with its packed file, and its logits."""

    case: Case
    path: Path
    whole: Path
    back_end: BackEnd
    logits: torch.Tensor

    def run(self, seed: int) -> bool:
        """Load with a spoilt file; return whether it was not used. A forged header may make other weights of it."""
        with tempfile.TemporaryDirectory() as parent:
            file = Path(shutil.copy(self.whole, parent))
            done = spoil(file, random.Random(seed))
            spoilt = file.stat().st_ino
            try:
                found = logits(load(self.case, self.path, self.back_end, file))
            except BaseException as fault:
                fault.add_note(f"seed {seed}: {done}")
                raise
            is_refused = file.stat().st_ino != spoilt
            assert torch.equal(found, self.logits) or not is_refused, f"seed {seed}: {done}"
            return is_refused


def test_spoilt_file_is_packed_again(fuzzed: Spoilt) -> None:
    assert sum(fuzzed.run(seed) for seed in range(17)) > 10


@pytest.mark.fuzz
def test_many_spoilt_files(fuzzed: Spoilt) -> None:
    refused = list[bool]()
    fuzz(lambda seed: refused.extend(fuzzed.run(500 * seed + i) for i in range(500)), 500)
    assert sum(refused) > len(refused) // 2
