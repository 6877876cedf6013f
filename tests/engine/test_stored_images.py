"""Images where blocks outlive the process: the disk tier, by engines that number images anew, and spoilt bytes."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quire.core.image_processing import PreparedImage
from quire.core.images import PromptImage
from quire.core.token_ids import pack_tokens
from quire.engine import kv_reads
from quire.engine.fleet.offline_fleet import BlockingFleet
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.extension.isas import usable_isas
from support.answers import Answer, answers_of
from support.image_prompts import (
    GREEDY,
    IMAGE,
    PROCESSOR_FILE,
    generate,
    open_llm,
    random_image,
    random_reference,
    save,
    text,
)
from support.server import wait_until

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

HOST = f"127.{1 + os.getpid() // 65536 % 250}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"  # of this process
TEXT = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SQUARE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
}  # fmt: skip
ANY = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 7, "out_hidden_size": 48,
}  # fmt: skip
PLACES = {"rope_type": "default", "mrope_section": [2, 1, 1]}
GEMMA = {
    "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 20, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
HYBRID = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": PLACES | {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
}  # fmt: skip
SIZE = {"height": 56, "width": 56}
ANY_SIZE = {
    "min_pixels": 14 * 14, "max_pixels": 64 * 14 * 14, "patch_size": 7, "merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": (
        "Llava", {
            "text_config": TEXT | {"model_type": "llama"}, "image_token_index": IMAGE,
            "vision_config": SQUARE | {"model_type": "clip_vision_model", "patch_size": 14},
        }, {"size": {"shortest_edge": 56}, "crop_size": SIZE},
    ),
    "gemma3": (
        "Gemma3", {
            "text_config": TEXT | GEMMA | {"model_type": "gemma3_text"}, "image_token_index": IMAGE,
            "vision_config": SQUARE | {"model_type": "siglip_vision_model", "patch_size": 7, "vision_use_head": False},
            "mm_tokens_per_image": 16,
        }, {"size": SIZE},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL", {
            "text_config": TEXT | {"rope_parameters": PLACES}, "image_token_id": IMAGE,
            "vision_config": ANY | {"window_size": 28, "fullatt_block_indexes": [1]},
        }, ANY_SIZE,
    ),
    "qwen3_5": (
        "Qwen3_5", {
            "text_config": TEXT | HYBRID, "vision_config": ANY | {"num_position_embeddings": 25},
            "image_token_id": IMAGE,
        }, ANY_SIZE,
    ),
}  # fmt: skip
NUM_ROWS = 16   # placeholders of an image, 4 x 4
PARAMS = replace(GREEDY, max_tokens=4)    # an answer ends in the block that it begins in


@cache
def write(root: Path, family: str) -> Path:
    name, config, processor = FAMILIES[family]
    folder = root / family
    save(random_reference(name, config), folder, processor)
    return folder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no read be given up, on a machine of any speed."""
    monkeypatch.setattr(kv_reads, "READ_LIMIT_S", math.inf)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def picture(number: int) -> PreparedImage:
    return random_image(number, 56, 56, (4, 4))


def prompt(*parts: list[int] | int, serials: Mapping[int, int], salt: str | None = None) -> TokenizedPrompt:
    """Return a prompt of texts, lists of ids, and images by number. `serials`: what a server has numbered them."""
    ids, images = list[int](), list[PromptImage]()
    for part in parts:
        if isinstance(part, int):
            images.append(PromptImage(len(ids), NUM_ROWS, serials[part], picture(part)))
        ids += [IMAGE] * NUM_ROWS if isinstance(part, int) else part
    return TokenizedPrompt(None, pack_tokens(ids), salt, images=tuple(images))


FIRST, SECOND = {1: 0, 2: 1}, {1: 4, 2: 0, 3: 1}   # of two servers: 0 and 1 are other images in the second
PARTS = text(1, 13), 1, text(2, 6), 2, text(3, 7)  # 58 tokens; cuts of blocks are in both images


def ask(folder: Path, disk: Path | None, *prompts: TokenizedPrompt, **settings: Any) -> list[tuple[list[Answer], int]]:  # noqa: ANN401
    """Return the answers of an engine of its own, one after the other, and the tokens that came from the disk."""
    kept = {"enable_prefix_caching": False} if disk is None else {"kv_disk_dir": disk, "kv_disk_size": "64MiB"}
    with open_llm(folder, **kept | settings) as llm:
        found = [generate(llm, [each], PARAMS)[0] for each in prompts]
        if disk is not None:
            llm._engine.engine.disk.drain(600)
        return [(answers_of(each), each.metrics.num_disk_tokens) for each in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_found_on_a_disk_by_their_pixels_with_the_same_bits(
    family: str, root: Path, tmp_path: Path
) -> None:
    folder, has_states = write(root, family), family == "qwen3_5"
    longer, another = (*PARTS, 3, text(4, 9)), (PARTS[0], 2, *PARTS[2:])
    third, again = (PARTS[0], 3, *PARTS[2:]), (*PARTS[:3], 1, *PARTS[4:])
    asked = [prompt(*parts, serials=FIRST | {3: 9}) for parts in (PARTS, longer, another, third, again)]
    expected = [each for each, _ in ask(folder, None, *asked)]

    def found(*parts: list[int] | int, serials: Mapping[int, int] = SECOND, salt: str | None = None) -> object:
        return ask(folder, tmp_path, prompt(*parts, serials=serials, salt=salt))[0]

    found(*PARTS[:2], serials=FIRST)    # the last full block ends inside of the image
    assert found(*PARTS, serials=FIRST) == (expected[0], 0 if has_states else 24)
    assert found(*PARTS) == (expected[0], 56)
    assert found(*longer) == (expected[1], 56)
    # Nothing is found from the first block with another image on, nor in another scope.
    assert found(*another, serials=FIRST) == (expected[2], 0)
    assert found(*third) == (expected[3], 0)
    assert found(*again) == (expected[4], 0 if has_states else 32)
    assert found(*PARTS, salt="other") == (expected[0], 0)
    assert found(*PARTS, salt="other", serials=FIRST) == (expected[0], 56)


def test_spoilt_blocks_and_other_processors_cost_time_and_no_bit(root: Path, tmp_path: Path) -> None:
    """Pixels come with each request. Another normalization gives other rows, so images are not found; text is."""
    folder, other, asked = write(root, "llava"), tmp_path / "other", prompt(text(1, 17), *PARTS[1:], serials=FIRST)
    shutil.copytree(folder, other)
    settings = json.loads((other / PROCESSOR_FILE).read_text())
    (other / PROCESSOR_FILE).write_text(json.dumps(settings | {"image_mean": [0.4, 0.4, 0.6]}))
    (expected, _), = ask(folder, None, asked)
    ask(folder, tmp_path / "disk", asked)
    assert ask(other, tmp_path / "disk", asked) == [(ask(other, None, asked)[0][0], 16)]
    (blocks,) = (tmp_path / "disk").glob("*/0/blocks")
    with blocks.open("r+b") as file:
        file.seek(4096 * 3 + 5)     # the fourth block, in the first image
        changed = file.read(1)[0] ^ 4
        file.seek(4096 * 3 + 5)
        file.write(bytes([changed]))
    assert ask(folder, tmp_path / "disk", asked) == [(expected, 24)]
    assert ask(folder, tmp_path / "disk", asked) == [(expected, 56)]


@pytest.mark.usefixtures("forked_processes")
def test_engines_for_prompts_hand_over_blocks_with_images(root: Path) -> None:
    """The consumer encodes nothing of an image: it computes the last tokens alone."""
    folder, salts = write(root, "qwen2_5_vl"), count()
    parts = [PARTS, (PARTS[0], 2, *PARTS[2:])]
    expected = [each for each, _ in ask(folder, None, *(prompt(*each, serials=FIRST) for each in parts))]
    apart = {"data_parallel_size": 2, "prefill_engines": 1, "kv_host": HOST, "kv_port": 15320}
    with open_llm(folder, **apart, prefill_least_tokens=9) as llm:
        assert isinstance(llm._runner, BlockingFleet)
        decodes = llm._runner._client.engines[1]
        wait_until(lambda: decodes.state.kv is not None and decodes.state.kv.transfer.get("peers_connected") == 1)

        def are_fetched() -> bool:  # again on a machine that stood still: a lease is over by then
            salt = str(next(salts))
            asked = [prompt(*each, serials=FIRST, salt=salt) for each in parts]
            found = llm._finish_all(llm._prepare(asked, PARAMS), use_tqdm=False)
            assert [answers_of(each) for each in found] == expected
            return all(each.metrics is not None and each.metrics.num_peer_tokens >= 48 for each in found)

        wait_until(are_fetched)
