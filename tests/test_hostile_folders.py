"""Model folders from hostile hands: each serves, or ends in a ModelError that names it. Never anything else."""

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.core.errors import ContextLengthError, ModelError
from support.random_model import VOCAB_SIZE, write_random_model
from support.server import ServerProcess
from support.small_tokenizers import CHAT_TEMPLATE, byte_level, save
from support.threads import set_num_threads

MAX_GROWTH_BYTES = 2 << 30
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILES = (*JSON_FILES, "model.safetensors")
MORE_KEYS = ("head_dim", "rope_parameters", "rope_scaling", "rope_theta", "eos_token_id", "layer_types", "dtype",
             "architectures", "sliding_window", "quantization_config", "chat_template", "added_tokens")  # fmt: skip
JUNK = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 2, 7, VOCAB_SIZE, 2**16, 2**23, 2**24, 2**31, 10**9, 2**63, 10**400),
        *(0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "512", "\0", "\ud800", "{{ 1/0 }}"),
        *([], [0], [-1], [10**9], [None], [0] * 10_000, {}, {"a": 1}, {"rope_type": "yarn", "factor": 1e30}),
        {"rope_type": "llama3", "factor": 1e-30, "low_freq_factor": 1e30, "high_freq_factor": 1},
    ]
)


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of a tiny model with all kinds of files."""
    folder = write_random_model(tmp_path_factory.mktemp("whole"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "do_sample": false}')
    return save(byte_level(), folder, chat_template=CHAT_TEMPLATE)


def places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 (JSON)
    """Yield every container with each of its keys, long lists cut short."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value))[:40]:
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def spoil_json(path: Path, draw: st.DataObject) -> None:
    """Replace, add or drop values."""
    content = json.loads(path.read_text())
    for _ in range(draw.draw(st.integers(1, 3), "changes")):
        found = [*places(content), *((content, key) for key in MORE_KEYS)]
        container, key = draw.draw(st.sampled_from(found), "place")
        container[key] = json.loads(json.dumps(draw.draw(JUNK, "value")))
        if draw.draw(st.integers(0, 9)) == 0:
            del container[key]
    path.write_text(json.dumps(content))


def spoil_bytes(path: Path, draw: st.DataObject) -> None:
    """Change bytes near the beginning, where a header is, or cut the file."""
    content = bytearray(path.read_bytes())
    for place in draw.draw(st.lists(st.integers(0, min(len(content), 3000) - 1), min_size=1, max_size=3), "places"):
        content[place] = draw.draw(st.integers(0, 255))
    path.write_bytes(content[: draw.draw(st.sampled_from([None, 0, 7, 9, len(content) // 2]), "length")])


def load_and_ask(folder: Path) -> None:
    """Load, and use all that the folder's files say something about."""
    params = SamplingParams(max_tokens=4, min_tokens=2, temperature=0, logprobs=1)
    with LLM(str(folder), num_kv_blocks=16, max_num_seqs=2) as llm:
        with suppress(ContextLengthError):  # a config may say that the model has one or two positions
            llm.generate([[5, 6]], params, use_tqdm=False)
        if llm.tokenizer is not None:
            llm.tokenizer.decode(llm.tokenizer.encode("the stop"))


def check_hostile(whole: Path, draw: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(whole, Path(parent) / "model"))
        name = draw.draw(st.sampled_from(FILES), "file")
        is_json = name in JSON_FILES and draw.draw(st.integers(0, 4)) > 0
        (spoil_json if is_json else spoil_bytes)(folder / name, draw)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            load_and_ask(folder)
        except ModelError as error:
            assert str(folder) in str(error)  # noqa: PT017 (loading may go well, too)
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH_BYTES


def run_hostile(whole: Path, count: int, *, derandomize: bool) -> None:
    @settings(max_examples=count, derandomize=derandomize, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(draw: st.DataObject) -> None:
        check_hostile(whole, draw)

    threads = torch.get_num_threads()
    set_num_threads(1)
    try:
        check()
    finally:
        set_num_threads(threads)


def test_a_spoilt_folder_serves_or_is_refused_by_name(whole_folder: Path) -> None:
    load_and_ask(whole_folder)
    run_hostile(whole_folder, 40, derandomize=True)


@pytest.mark.fuzz
def test_many_spoilt_folders(whole_folder: Path) -> None:
    run_hostile(whole_folder, 3000, derandomize=False)


def link_tokenizer_out(folder: Path) -> None:
    shutil.move(folder / "tokenizer.json", folder.parent / "elsewhere.json")
    (folder / "tokenizer.json").symlink_to("../elsewhere.json")


def end_outside_of_the_vocabulary(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, VOCAB_SIZE]}))


def replace_template_by_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "chat_template.jinja")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (link_tokenizer_out, "tokenizer.json: links to"),
        (end_outside_of_the_vocabulary, "generation_config.json: eos_token_id must be a token id from 0 to 300"),
        (replace_template_by_a_pipe, "no file chat_template.jinja"),
    ],
)
def test_what_a_file_has_wrong_is_told(
    whole_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    folder = Path(shutil.copytree(whole_folder, tmp_path / "model"))
    spoil(folder)
    with pytest.raises(ModelError, match=words):
        load_and_ask(folder)


def test_server_refuses_before_it_serves(whole_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole_folder, tmp_path / "model"))
    end_outside_of_the_vocabulary(folder)
    server = ServerProcess(str(folder), "--port", "0", "--num-kv-blocks", "16", is_forked=True)
    try:
        assert server.wait() == 1
        assert server.out == ""
        assert "eos_token_id must be a token id from 0 to 300" in server.log
        assert server.log.count("\n") == 1
    finally:
        server.close()
