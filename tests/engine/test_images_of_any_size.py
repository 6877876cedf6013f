"""Images of any size in the engine against transformers, and bits that no schedule, cache or preemption changes.

Tokens behind an image have other positions than indexes, and those in it have rows and columns.
"""

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from quire import BeamSearchParams
from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.core.image_processing import PreparedImage
from quire.core.images import PromptImage
from quire.core.sampling_params import as_sampling_params
from quire.core.token_ids import pack_tokens
from quire.engine.options import EngineOptions
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.kernels.choice import choose_back_end
from quire.model.config import num_parameters, spec_from_config
from quire.model.loader import load_model
from quire.model.merging_vision import grid_of, merged_flops
from quire_lab.sim.footprint import weight_bytes
from quire_lab.sim.hardware import HARDWARE
from quire_lab.sim.models import read_model
from quire_lab.sim.planning import plan_memory
from support.answers import Answer, answers_of
from support.image_prompts import (
    GREEDY,
    IMAGE,
    PROCESSOR_FILE,
    RANDOM,
    answers,
    answers_alone,
    check_every_cut,
    check_greedy_answers,
    check_memory_of_encoding,
    check_preempted,
    check_ranks,
    check_rounded_encoder,
    generate,
    open_llm,
    random_image,
    random_reference,
    save,
    text,
    values_of,
)
from support.oracle_drafter import let_draft
from support.random_folder import write_random_folder, write_random_head

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
UNIT, HIDDEN = 14, 48   # the pixels of a placeholder in a row, the width of the decoder
VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 7, "out_hidden_size": HIDDEN,
}  # fmt: skip
TEXT = {
    "vocab_size": 160, "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
QWEN25_VISION = VISION | {"window_size": 28, "fullatt_block_indexes": [1]}
QWEN3_VISION = VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 25}
QWEN25 = {
    "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "vision_config": QWEN25_VISION, "image_token_id": IMAGE,
}  # fmt: skip
QWEN3 = {
    "text_config": TEXT | {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "vision_config": QWEN3_VISION, "image_token_id": IMAGE,
}  # fmt: skip
QWEN2 = QWEN25 | {
    "vision_config": {
        "depth": 3, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2, "num_heads": 4, "patch_size": 7,
    },
}  # fmt: skip
HYBRID = TEXT | {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
QWEN35 = {
    "text_config": HYBRID, "vision_config": VISION | {"num_position_embeddings": 25}, "image_token_id": IMAGE,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32,
}  # fmt: skip
QWEN3_TEXT: dict[str, object] = QWEN3["text_config"]  # type: ignore[assignment]
QWEN3_MOE, QWEN35_MOE = QWEN3 | {"text_config": QWEN3_TEXT | EXPERTS}, QWEN35 | {"text_config": HYBRID | EXPERTS}
FAMILIES = {
    "qwen2_5_vl": ("Qwen2_5_VL", QWEN25), "qwen3_vl": ("Qwen3VL", QWEN3), "qwen3_5": ("Qwen3_5", QWEN35),
}  # fmt: skip
OTHERS = {
    "qwen2_vl": ("Qwen2VL", QWEN2), "qwen3_vl_moe": ("Qwen3VLMoe", QWEN3_MOE),
    "qwen3_5_moe": ("Qwen3_5Moe", QWEN35_MOE),
}  # fmt: skip
TEXT_MODELS = {"qwen2_5_vl": "Qwen2ForCausalLM", "qwen3_vl": "Qwen3ForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}
PROCESSOR = {"patch_size": 7, "merge_size": 2}
SIZES = ((28, 112), (42, 70), (14, 56), (70, 14), (14, 14), (28, 112))     # pixels; rows of 8, 5, 4 and 1


def make_reference(family: str, **changes: object) -> "transformers.PreTrainedModel":
    """Return a model of transformers with random parameters."""
    name, config = (FAMILIES | OTHERS)[family]
    return random_reference(name, config | changes)


@pytest.fixture(scope="module", autouse=True)
def _reference_by_tokens() -> Iterator[None]:
    """Let transformers compute gated delta nets token by token: its form by chunks differs from that by 2e-4."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("qwen3_5", "qwen3_5_moe"):
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(make_reference(request.param), path, PROCESSOR)
    return path


@cache
def picture(number: int) -> PreparedImage:
    height, width = SIZES[number]
    return random_image(number, height, width, (height // UNIT, width // UNIT))


def pixels(number: int) -> torch.Tensor:
    return values_of(picture(number))


def patches_of(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return images as transformers' model takes them."""
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=7, merge_size=2)
    cut = [processor.patchify(pixels(each).numpy(), 7, 2, 2) for each in numbers]
    grids = torch.tensor([(1, *grid) for _, *grid in cut])
    return {"pixel_values": torch.tensor(np.concatenate([rows for rows, *_ in cut])), "image_grid_thw": grids}


def features(model: "transformers.PreTrainedModel", numbers: Sequence[int]) -> torch.Tensor:
    """Return what transformers makes of images [num_tokens, any], with what layers add behind it."""
    with torch.no_grad():
        found = model.get_image_features(**patches_of(numbers))
    deep = getattr(found, "deepstack_features", None) or ()
    return torch.cat([torch.cat(list(each)) for each in (found.pooler_output, *deep)], 1)


def prompt(*parts: list[int] | int) -> TokenizedPrompt:
    """Return a prompt of texts, lists of ids, and images, their numbers, which are their serials, too."""
    ids, images = list[int](), list[PromptImage]()
    for part in parts:
        if isinstance(part, int):
            own = picture(part)
            images.append(PromptImage(len(ids), own.grid[0] * own.grid[1], part, own))
        ids += [IMAGE] * images[-1].num_tokens if isinstance(part, int) else part
    return TokenizedPrompt(None, pack_tokens(ids), None, images=tuple(images))


PROMPTS = (
    prompt(text(1, 9), 0, text(2, 6)),
    prompt(1, text(3, 3)),
    prompt(text(1, 9), 2, text(4, 3), 1, text(5, 2), 4, text(8, 3)),
    prompt(text(6, 20)),
    prompt(text(7, 5), 3),
    prompt(text(1, 9), 0, 2, text(2, 1)),
)
PARAMS = (GREEDY, RANDOM, GREEDY, RANDOM, GREEDY, RANDOM)


def row_bytes(folder: Path) -> int:
    """Return the bytes of an encoded row; outputs of early layers are in it."""
    return HIDDEN * 4 * (3 if "qwen3_vl" in folder.name else 1)


def has_states(folder: Path) -> bool:
    """Return whether the text model keeps states, which a prefix is found by at the end of a block alone."""
    return "qwen3_5" in folder.name


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[Answer]]:
    return answers_alone(folder, PROMPTS, PARAMS)


# --- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_end", ["cpp", "torch", "reference"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_5_vl", {}),
        ("qwen2_5_vl", {"fullatt_block_indexes": [0, 2], "window_size": 42}),
        ("qwen2_vl", {}),
        ("qwen3_vl", {}),
        ("qwen3_vl", {"deepstack_visual_indexes": [2], "hidden_act": "gelu"}),
        ("qwen3_vl", {"deepstack_visual_indexes": []}),
        ("qwen3_vl_moe", {}),
        ("qwen3_5", {}),
    ],
    ids=[
        "qwen2.5", "qwen2.5, other windows", "qwen2", "qwen3", "qwen3, last layer", "qwen3, no layers",
        "qwen3, experts", "qwen3.5",
    ],
)
def test_a_tower_equals_transformers(
    family: str, changes: dict[str, object], back_end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vision = (FAMILIES | OTHERS)[family][1]["vision_config"]
    assert isinstance(vision, dict)
    model = make_reference(family, vision_config=vision | changes)
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, back_end=choose_back_end("cpu", back_end))
    assert decoder.vision is not None
    order = range(len(SIZES))
    found = [torch.as_tensor(np.asarray(decoder.vision.encode(pixels(each).numpy()))) for each in (*order, 0)]
    torch.testing.assert_close(torch.cat(found[:-1]), features(model, order), rtol=0, atol=TOLERANCE)
    assert torch.equal(found[-1], found[0])
    assert decoder.progress[0] == len(found) * decoder.vision.spec.tower.num_layers
    assert decoder.vision.layer_flops(16) > 2 * 16 * 4 * 32 * (32 * 4 + 2 * 48)  # its projections
    assert "not used" not in caplog.text
    assert decoder.num_parameters == num_parameters(decoder.spec)
    if back_end == "cpp":
        assert decoder.weight_bytes == weight_bytes(decoder.spec, "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_error_of_a_tower_is_at_most_1_2_times_that_of_transformers(family: str, tmp_path: Path) -> None:
    rounded = make_reference(family).bfloat16()
    rounded.save_pretrained(tmp_path)
    tower = load_model(tmp_path, back_end=choose_back_end("cpu", "torch")).vision
    assert tower is not None
    found = torch.cat([tower.encode(pixels(each).numpy()).float() for each in range(len(SIZES))])
    theirs = features(rounded, range(len(SIZES))).float()
    exact = features(rounded.float(), range(len(SIZES)))
    errors = [(each - exact).square().mean().sqrt() for each in (found, theirs)]
    assert 0 < errors[0] <= 1.2 * errors[1]


def test_an_encoder_beside_a_rounded_model_is_of_int8(folder: Path) -> None:
    check_rounded_encoder(folder, list(map(picture, range(len(SIZES)))))


def test_encoding_takes_no_more_memory_than_is_planned_for(folder: Path) -> None:
    check_memory_of_encoding(folder, random_image(1, 28 * UNIT, 28 * UNIT, (28, 28)))


def test_answers_equal_transformers(folder: Path) -> None:
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()

    def logits(asked: TokenizedPrompt, ids: torch.Tensor) -> torch.Tensor:
        types = {"mm_token_type_ids": (ids == IMAGE).int(), **patches_of([each.serial for each in asked.images])}
        found: torch.Tensor = reference(input_ids=ids, **types).logits
        return found

    check_greedy_answers(folder, PROMPTS[:3], logits)


@pytest.mark.parametrize("family", OTHERS)
def test_answers_of_other_families_equal_transformers(family: str, tmp_path: Path) -> None:
    save(make_reference(family), tmp_path, PROCESSOR)
    test_answers_equal_transformers(tmp_path)


@pytest.mark.parametrize("num_heads", [8, 2])
def test_encoders_with_heads_that_no_kernel_of_the_cpu_has_are_served(num_heads: int, tmp_path: Path) -> None:
    """Heads of 4, and of 640: PyTorch's kernels serve, as for such a text model."""
    vision = {**QWEN25_VISION, "num_heads": num_heads, "hidden_size": 32 if num_heads == 8 else 1280, "depth": 2}
    save(make_reference("qwen2_5_vl", vision_config=vision), tmp_path, PROCESSOR)
    test_answers_equal_transformers(tmp_path)


def test_files_as_published_and_as_in_memory_are_one_model(folder: Path, tmp_path: Path) -> None:
    """As published the text model of a Qwen2.5-VL is no part of the config, and its rotary positions are `mrope`."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    is_old = config["model_type"] == "qwen2_5_vl"
    changes = {"model.visual.": "visual."}
    if is_old:
        changes = {"visual.": "model.visual.", "model.": "model.language_model."}
    renamed = dict[str, torch.Tensor]()
    for name, each in tensors.items():
        old = next((old for old in changes if name.startswith(old)), "")
        renamed[changes.get(old, "") + name.removeprefix(old)] = each
    assert renamed.keys() != tensors.keys()
    if is_old:
        own = config.pop("text_config")
        rope = own.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config = own | config | {"rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / PROCESSOR_FILE).write_text((folder / PROCESSOR_FILE).read_text())
    with open_llm(folder) as llm:
        expected = answers(llm, PROMPTS[:1])
    with open_llm(tmp_path) as llm:
        assert answers(llm, PROMPTS[:1]) == expected


# --- bits -------------------------------------------------------------------------------------------------------------


def test_batched_requests_have_their_bits(folder: Path, alone: list[list[Answer]]) -> None:
    with open_llm(folder) as llm:
        assert answers(llm, PROMPTS, PARAMS) == alone
        assert answers(llm, PROMPTS[::-1], PARAMS[::-1]) == alone[::-1]    # all found in the cache


@pytest.mark.usefixtures("forked_processes")
def test_ranks_have_the_bits_of_one(folder: Path, alone: list[list[Answer]]) -> None:
    check_ranks(folder, PROMPTS, PARAMS, alone)


def test_chunks_with_cuts_at_every_place_have_the_bits_of_one(folder: Path, alone: list[list[Answer]]) -> None:
    check_every_cut(folder, PROMPTS[2], alone[2])


def test_prefix_hits_before_inside_and_behind_images_have_the_bits_of_none(
    folder: Path, alone: list[list[Answer]]
) -> None:
    """A request ends with a whole image; all but its last token is a hit inside of it."""
    with open_llm(folder) as llm:
        for index in (0, 2, 4, 5):
            each, params = PROMPTS[index], PARAMS[index]
            ids, images = list(each.token_ids), each.images
            for cut in range(1, len(ids)):
                if any(image.start < cut < image.start + image.num_tokens for image in images):
                    continue
                first, salted = tuple(image for image in images if image.start < cut), each.salted(f"{index} {cut}")
                shorter = salted._replace(token_ids=pack_tokens(ids[:cut]), images=first)
                generate(llm, [shorter])
                (found,) = generate(llm, [salted], params)
                assert answers_of(found) == alone[index], cut
                assert found.num_cached_tokens >= (cut // 8 * 8 if has_states(folder) else cut - (cut == len(ids)))
            own = each.salted(str(index))
            generate(llm, [own], params)
            (found,) = generate(llm, [own], params)             # all but the last token, which may be of an image
            expected = (len(ids) - 1) // 8 * 8 if has_states(folder) else len(ids) - 1
            assert (found.num_cached_tokens, answers_of(found)) == (expected, alone[index])


def test_images_of_one_size_and_in_another_order_never_meet_in_the_cache(folder: Path) -> None:
    pairs = [(PROMPTS[0], prompt(text(1, 9), 5, text(2, 6))), (PROMPTS[5], prompt(text(1, 9), 2, 0, text(2, 1)))]
    for first, second in pairs:
        with open_llm(folder, enable_prefix_caching=False) as llm:
            expected = answers(llm, [second])
        with open_llm(folder) as llm:
            generate(llm, [first])
            (found,) = generate(llm, [second])
            assert [answers_of(found)] == expected
            assert found.num_cached_tokens <= 9
            (salted,) = generate(llm, [second.salted("other")])
            assert (answers_of(salted), salted.num_cached_tokens) == (expected[0], 0)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_have_their_bits(mode: str, folder: Path) -> None:
    assert check_preempted(folder, mode, PROMPTS, PARAMS, 16 * row_bytes(folder)) > 0


def test_forks_beams_and_drafts_have_the_bits_of_none(folder: Path) -> None:
    several, longer = replace(RANDOM, n=3, max_tokens=12), replace(GREEDY, max_tokens=24)
    beam = BeamSearchParams(beam_width=3, max_tokens=10)
    with open_llm(folder) as llm:
        forked, greedy = answers(llm, PROMPTS[:3], several), answers(llm, PROMPTS, longer)
    beams = []
    for budget in (64, 13):
        with open_llm(folder, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
            assert answers(llm, PROMPTS[:3], several) == forked
            own = llm._prepare(list(PROMPTS[:3]), as_sampling_params(beam), beam=beam)
            beams.append([answers_of(each) for each in llm._finish_all(own, use_tqdm=False)])
            for sequence in beams[-1][0]:           # its score is that of the same tokens behind the same image
                ids = [*PROMPTS[0].token_ids, *sequence.token_ids]
                (scored,) = generate(
                    llm, [PROMPTS[0]._replace(token_ids=pack_tokens(ids))], replace(GREEDY, prompt_logprobs=1)
                )
                found = scored.prompt_logprobs or []
                given = [found[index][ids[index]].logprob for index in range(len(PROMPTS[0].token_ids), len(ids))]  # type: ignore[index]
                assert sum(given) == pytest.approx(float.fromhex(sequence.cumulative_logprob or ""), abs=TOLERANCE)
    assert beams[0] == beams[1]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with open_llm(folder, speculative_config=drafts) as llm:
        assert answers(llm, PROMPTS, longer) == greedy


def test_drafts_of_an_mtp_head_behind_images_have_the_bits_of_none(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    save(make_reference("qwen3_5"), folder, PROCESSOR)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    text_model = config["text_config"] | {"architectures": [TEXT_MODELS["qwen3_5"]]}
    own = load_file(write_random_folder(tmp_path / "text", text_model) / "model.safetensors")
    weights |= {name: each for name, each in own.items() if name.startswith("mtp.")}
    save_file(weights, folder / "model.safetensors")
    drafts, longer = {"method": "mtp", "num_speculative_tokens": 3}, replace(GREEDY, max_tokens=24)
    with open_llm(folder) as llm:
        expected = answers(llm, PROMPTS, longer)
    with open_llm(folder, speculative_config=drafts) as llm:
        counted = let_draft(llm)
        assert answers(llm, PROMPTS, longer) == expected
        assert counted.num_verified > 100
        assert not llm._engine.engine.executor.worker.compute.drafter._drafter._method._has_failed  # type: ignore[attr-defined]


def test_drafts_of_an_eagle_head_behind_images_have_the_bits_of_none(tmp_path: Path) -> None:
    """Streams are tapped between the layers that image rows are added to."""
    save(make_reference("qwen3_vl"), tmp_path / "whole", PROCESSOR)
    own = json.loads((tmp_path / "whole" / "config.json").read_text())["text_config"]
    names = {"architectures": ["Eagle3Qwen3vlForCausalLM"], "num_hidden_layers": 1}
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, own["num_hidden_layers"]]}
    head = write_random_head(tmp_path / "head", own | names | ids | {"rope_scaling": None, "rope_parameters": None})
    drafts, longer = {"method": "eagle3", "model": str(head)}, replace(GREEDY, max_tokens=24)
    with open_llm(tmp_path / "whole") as llm:
        expected = answers(llm, PROMPTS, longer)
    with open_llm(tmp_path / "whole", speculative_config=drafts) as llm:
        counted = let_draft(llm)
        assert answers(llm, PROMPTS, longer) == expected
        assert counted.num_verified > 100
        assert not llm._engine.engine.executor.worker.compute.drafter._drafter._method._has_failed  # type: ignore[attr-defined]


def test_text_has_the_bits_of_the_text_model(folder: Path, tmp_path: Path) -> None:
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    own = {name.replace(".language_model", ""): each for name, each in tensors.items() if "visual." not in name}
    save_file(own, tmp_path / "model.safetensors")
    names = {"architectures": [TEXT_MODELS[config["model_type"]]]}
    (tmp_path / "config.json").write_text(json.dumps(config["text_config"] | names))
    prompts = [prompt(text(seed, 5 + seed)) for seed in range(4)]
    with open_llm(tmp_path) as llm:
        expected = answers(llm, prompts, RANDOM)
    with open_llm(folder) as llm:
        assert answers(llm, prompts, RANDOM) == expected
        mixed = answers(llm, [PROMPTS[0], *prompts, PROMPTS[2]], RANDOM)
    assert mixed[1:-1] == expected


# --- bounds, bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (4, 4)}, r"images\[0\]: pixels must be 56 x 56 in 9408 bytes, got 28 x 112 in 9408 bytes"),
        ({"grid": (8, 2)}, r"images\[0\]: pixels must be 112 x 28 in 9408 bytes, got 28 x 112 in 9408 bytes"),
        ({"grid": (0, 8)}, r"images\[0\]: must have a grid of at least 1 x 1, got 0 x 8"),
        ({"pixels": b""}, r"images\[0\]: pixels must be 28 x 112 in 9408 bytes, got 28 x 112 in 0 bytes"),
        ({"grid": (2, 9), "width": 126}, r"images\[0\]: takes 18 tokens, and image_cache_memory holds 17"),
    ],
)
def test_images_that_do_not_fit_are_refused(change: dict[str, Any], message: str, folder: Path) -> None:
    given = PROMPTS[0].images[0]
    wrong = structs.replace(given, prepared=structs.replace(given.prepared, **change))
    with (
        open_llm(folder, image_cache_memory=17 * row_bytes(folder)) as llm,
        pytest.raises(InvalidRequestError, match=message),
    ):
        generate(llm, [PROMPTS[0]._replace(images=(wrong,))])


def test_random_weights_have_a_tower(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", PROCESSOR_FILE):
        (tmp_path / name).write_text((folder / name).read_text())
    with open_llm(tmp_path, load_format="dummy") as llm:
        first, second = answers(llm, [prompt(0, text(2, 3)), prompt(1, text(2, 3))])
    assert first != second


def test_packed_weights_have_the_tower(folder: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):                                              # written, and taken from there
        with open_llm(folder, packed_weights=str(tmp_path)) as llm:
            found.append((answers(llm, PROMPTS[:2]), llm._engine.model.weight_bytes))
    assert found[0] == found[1]


def test_windows_are_consecutive_rows() -> None:
    """3 x 5 squares of 2 x 2 patches in windows of 2 x 2 squares: the last ones of a row and a column are smaller."""
    found = grid_of(3, 5, 2, 2)
    assert found.order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert found.window_lengths.tolist() == [16, 16, 8, 8, 8, 4]
    assert (found.rows[:8].tolist(), found.columns[:8].tolist()) == ([0, 0, 1, 1] * 2, [0, 1, 0, 1, 2, 3, 2, 3])
    whole = grid_of(3, 5, 2, 0)
    assert (whole.order.tolist(), whole.window_lengths.tolist()) == (list(range(15)), [60])


def test_the_operations_of_an_image_are_those_of_qwen() -> None:
    """Qwen2.5-VL 7B's: 32 layers, 4 of them without windows, and the projector: 1.3 GFLOP for each patch."""
    vision = {"hidden_size": 1280, "out_hidden_size": 3584}
    config = TEXT | {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "vision_config": vision}
    spec = spec_from_config({"architectures": ["Qwen2_5_VLForConditionalGeneration"], **config, "vocab_size": 152_064})
    assert spec.vision is not None
    assert spec.vision.merging is not None
    assert (spec.vision.unit, spec.vision.merging.window, spec.vision.row_width) == (28, 4, 3584)
    row, pair = merged_flops(spec.vision)
    assert 4 * 1.2e9 < row < 4 * 1.4e9
    assert pair == 4 * 4 * 1280 * 4**2


def test_a_plan_tells_what_an_image_takes(folder: Path) -> None:
    own = replace(HARDWARE["H100"], device="cpu")
    found = plan_memory(read_model(str(folder)), own, EngineOptions(str(folder), max_model_len=128))
    num_tokens = (1024 // UNIT) ** 2                                # the image that the plan names
    assert (found.image_tokens, found.image_bytes) == (num_tokens, num_tokens * row_bytes(folder))
    assert found.image_size == "1024 x 1024"
    vision = load_model(folder, back_end=choose_back_end("cpu")).weight_bytes
    text_alone = weight_bytes(replace(read_model(str(folder)).spec, vision=None), "float32")
    assert found.vision_weight_bytes == vision - text_alone


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2_5_vl", {"window_size": 13}, "window_size 13 has no square of 2 x 2 patches of 7 pixels"),
        ("qwen2_5_vl", {"fullatt_block_indexes": [3]}, "fullatt_block_indexes must be a list of integers from 0 to 2"),
        ("qwen2_5_vl", {"out_hidden_size": 32}, "out_hidden_size 32 must be the text model's hidden_size 48"),
        ("qwen2_vl", {"mlp_ratio": 0.01}, "mlp_ratio 0.01 of embed_dim 32 must give a width from 1 to 16777216"),
        ("qwen2_vl", {"mlp_ratio": 1e9}, "mlp_ratio 1000000000.0 of embed_dim 32 must give a width from 1 to"),
        ("qwen2_5_vl", {"hidden_size": 24}, "heads of 6 dimensions cannot be rotated by row and column"),
        ("qwen3_vl", {"num_position_embeddings": 24}, "num_position_embeddings 24 must be a square"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 2]}, "deepstack_visual_indexes must be at most 2 layers"),
        ("qwen3_vl", {"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes must be at most 2 layers, each"),
        ("qwen3_vl", {"hidden_act": "mish"}, "hidden_act must be one of"),
        ("qwen3_5", {"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes = \[1\] is not supported yet"),
        ("qwen3_5", {"num_position_embeddings": 24}, "num_position_embeddings 24 must be a square"),
        ("qwen3_5_moe", {"out_hidden_size": 32}, "out_hidden_size 32 must be the text model's hidden_size 48"),
    ],
)
def test_encoders_that_cannot_be_served_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    name, config = (FAMILIES | OTHERS)[family]
    vision = config["vision_config"]
    assert isinstance(vision, dict)
    with pytest.raises(ModelError, match=message):
        spec_from_config(
            {"architectures": [f"{name}ForConditionalGeneration"], **config, "vision_config": vision | changes}
        )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([2, 2, 1], "mrope_section must be three numbers of pairs, 4 in all, got"),
        ([4], "mrope_section must be three numbers of pairs, 4 in all"),
        ([4, "0", 0], "mrope_section must be three numbers of pairs, 4 in all"),
    ],
)
def test_sections_that_do_not_fit_are_refused(sections: list[Any], message: str) -> None:
    text_config = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": sections}}
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], **QWEN25, "text_config": text_config}
    with pytest.raises(ModelError, match=message):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"max_pixels": 0}', "mm_processor_kwargs: max_pixels must be an integer of at least 1, got 0"),
        ('{"fps": 2}', "mm_processor_kwargs can have min_pixels and max_pixels, got 'fps'"),
        ("[]", "mm_processor_kwargs must be a JSON object"),
    ],
)
def test_limits_of_pixels_are_checked(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions("model", mm_processor_kwargs=given)
