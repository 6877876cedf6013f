"""Images with a token of text behind each row (Pixtral, Mistral 3): transformers' results, and bits of every schedule.

The rows of such an image are at placeholders that are not contiguous, and tokens have one position each.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

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
from quire_lab.sim.footprint import weight_bytes
from quire_lab.sim.hardware import HARDWARE
from quire_lab.sim.models import read_model
from quire_lab.sim.planning import plan_memory
from support.answers import Answer, answers_of
from support.image_prompts import (
    GREEDY,
    IMAGE,
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

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
BREAK, END, UNIT, HIDDEN = 157, 158, 14, 48
TEXT = {
    "vocab_size": 160, "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2, "model_type": "mistral", "sliding_window": None,
}  # fmt: skip
VISION: dict[str, object] = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "patch_size": 7, "image_size": 112,
}  # fmt: skip
MISTRAL3 = {"text_config": TEXT | {"rms_norm_eps": 1e-3}, "vision_config": VISION, "image_token_index": IMAGE}
PIXTRAL = {
    "text_config": TEXT, "vision_config": VISION | {"patch_size": UNIT, "hidden_act": "silu"},
    "vision_feature_layer": -1, "image_token_index": IMAGE, "vision_feature_select_strategy": "full",
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {"mistral3": ("Mistral3", MISTRAL3), "pixtral": ("Llava", PIXTRAL)}
SIZES = ((28, 56), (42, 28), (14, 56), (70, 14), (14, 14), (28, 56))  # pixels


def make_reference(family: str, **changes: object) -> "transformers.PreTrainedModel":
    """Return a model of transformers with random parameters."""
    name, config = FAMILIES[family]
    return random_reference(name, config | changes)


def write(family: str, folder: Path, **changes: object) -> Path:
    """Write a model and its processor's file."""
    size = {"size": {"longest_edge": 112}, "patch_size": UNIT, "do_pad": True}
    save(make_reference(family, **changes), folder, size)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param))


@cache
def picture(number: int) -> PreparedImage:
    height, width = SIZES[number]
    return random_image(number, height, width, (height // UNIT, width // UNIT))


def given(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return images as transformers' model takes them: padded to one size."""
    sizes = torch.tensor([SIZES[each] for each in numbers])
    padded = torch.zeros(len(numbers), 3, *sizes.amax(0).tolist())
    for index, number in enumerate(numbers):
        own = values_of(picture(number))
        padded[index, :, : own.shape[1], : own.shape[2]] = own
    return {"pixel_values": padded, "image_sizes": sizes}


def prompt(*parts: list[int] | int) -> TokenizedPrompt:
    """Return a prompt of texts, lists of ids, and images, their numbers, which are their serials, too."""
    ids, images = list[int](), list[PromptImage]()
    for part in parts:
        if isinstance(part, int):
            rows, columns = picture(part).grid
            run = ([IMAGE] * columns + [BREAK]) * rows
            images.append(PromptImage(len(ids), len(run), part, picture(part)))
            ids += [*run[:-1], END]
        else:
            ids += part
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


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[Answer]]:
    return answers_alone(folder, PROMPTS, PARAMS)


# --- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_end", ["cpp", "torch", "reference"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral3", {}), ("pixtral", {}),
        ("mistral3", {"vision_feature_layer": -2, "multimodal_projector_bias": True, "projector_hidden_act": "relu"}),
        ("mistral3", {"spatial_merge_size": 1, "vision_config": VISION | {"patch_size": 14}}),
    ],
    ids=["mistral 3", "pixtral", "other layer and biases", "squares of one patch"],
)  # fmt: skip
def test_a_tower_equals_transformers(
    family: str, changes: dict[str, object], back_end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_reference(family, **changes)
    save(model, tmp_path, {})
    decoder = load_model(tmp_path, back_end=choose_back_end("cpu", back_end))
    assert decoder.vision is not None
    order = range(len(SIZES))
    given_pixels = (values_of(picture(each)).numpy() for each in (*order, 0))
    found = [torch.as_tensor(np.asarray(decoder.vision.encode(each))) for each in given_pixels]
    with torch.no_grad():
        expected = torch.cat(list(model.get_image_features(**given(order)).pooler_output))
    torch.testing.assert_close(torch.cat(found[:-1]), expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(found[-1], found[0])
    assert all("vision" not in each and "projector" not in each for each in caplog.messages if "not used" in each)
    assert decoder.num_parameters == num_parameters(decoder.spec)
    if back_end == "cpp":
        assert decoder.weight_bytes == weight_bytes(decoder.spec, "float32")


def test_an_encoder_beside_a_rounded_model_is_of_int8(folder: Path) -> None:
    most = 0.06 if "mistral3" in folder.name else 0.03      # one more layer behind the encoder
    check_rounded_encoder(folder, list(map(picture, range(len(SIZES)))), most)


def test_encoding_takes_no_more_memory_than_is_planned_for(folder: Path) -> None:
    check_memory_of_encoding(folder, random_image(1, 28 * UNIT, 28 * UNIT, (28, 28)))


def test_answers_equal_transformers(folder: Path) -> None:
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()

    def logits(asked: TokenizedPrompt, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = reference(input_ids=ids, **given([each.serial for each in asked.images])).logits
        return found

    check_greedy_answers(folder, PROMPTS[:3], logits)


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


def test_prefix_hits_inside_and_behind_images_have_the_bits_of_none(folder: Path, alone: list[list[Answer]]) -> None:
    with open_llm(folder) as llm:
        for index in (0, 4, 5):
            each, params = PROMPTS[index], PARAMS[index]
            ids, (first, *_) = list(each.token_ids), each.images
            for cut in (first.start, first.start + first.num_tokens):
                before = tuple(image for image in each.images if image.start < cut)
                salted = each.salted(f"{index} {cut}")
                generate(llm, [salted._replace(token_ids=pack_tokens(ids[:cut]), images=before)])
                (found,) = generate(llm, [salted], params)
                assert (answers_of(found), found.num_cached_tokens >= min(cut, len(ids) - 1)) == (alone[index], True)
            other = each._replace(token_ids=pack_tokens([*ids[: first.start], *text(9, len(ids) - first.start)]))
            generate(llm, [other._replace(images=())])
            (found,) = generate(llm, [each.salted(str(index))], params)
            assert (answers_of(found), found.num_cached_tokens) == (alone[index], 0)
            (found,) = generate(llm, [each.salted(str(index))], params)     # its last token may be the end of an image
            assert (answers_of(found), found.num_cached_tokens) == (alone[index], len(ids) - 1)


def test_images_of_one_size_never_meet_in_the_cache(folder: Path) -> None:
    other = prompt(text(1, 9), 5, text(2, 6))
    with open_llm(folder, enable_prefix_caching=False) as llm:
        expected = answers(llm, [other])
    with open_llm(folder) as llm:
        generate(llm, PROMPTS[:1])
        (found,) = generate(llm, [other])
        assert ([answers_of(found)], found.num_cached_tokens) == (expected, 9)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_have_their_bits(mode: str, folder: Path) -> None:
    assert check_preempted(folder, mode, PROMPTS, PARAMS, 10 * HIDDEN * 4) > 0


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
    assert beams[0] == beams[1]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with open_llm(folder, speculative_config=drafts) as llm:
        assert answers(llm, PROMPTS, longer) == greedy


# --- bounds, bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({9: BREAK}, r"images\[0\]: placeholders \[9, 19\) must be the token 159"),
        ({13: IMAGE}, r"images\[0\]: placeholders \[9, 19\) must be the token 159"),
    ],
)
def test_placeholders_at_other_places_are_refused(wrong: dict[int, int], message: str, folder: Path) -> None:
    ids = [wrong.get(index, each) for index, each in enumerate(PROMPTS[0].token_ids)]
    with open_llm(folder) as llm, pytest.raises(InvalidRequestError, match=message):
        generate(llm, [PROMPTS[0]._replace(token_ids=pack_tokens(ids))])


def test_images_of_other_lengths_are_refused(folder: Path) -> None:
    image = structs.replace(PROMPTS[0].images[0], num_tokens=8)
    with open_llm(folder) as llm, pytest.raises(InvalidRequestError, match="must have 10 placeholders, got 8"):
        generate(llm, [PROMPTS[0]._replace(images=(image,))])


def test_limits_of_pixels_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs .*: the model bounds edges of images, not their area"):
        open_llm(folder, mm_processor_kwargs={"max_pixels": 1000})


def test_a_plan_tells_what_an_image_takes(folder: Path) -> None:
    own = replace(HARDWARE["H100"], device="cpu")
    found = plan_memory(read_model(str(folder)), own, EngineOptions(str(folder), max_model_len=128))
    num_tokens = 73 * 74                                # 1024 x 1024 pixels, the image that the plan names
    assert (found.image_tokens, found.image_bytes) == (num_tokens, num_tokens * HIDDEN * 4)
    whole, spec = load_model(folder, back_end=choose_back_end("cpu")).weight_bytes, read_model(str(folder)).spec
    assert found.vision_weight_bytes == whole - weight_bytes(replace(spec, vision=None), "float32")


@pytest.mark.parametrize(
    ("family", "changes", "vision", "message"),
    [
        ("mistral3", {}, {"hidden_size": 24}, "heads of 6 dimensions cannot be rotated by row and column"),
        ("mistral3", {"vision_feature_layer": 4}, {}, "vision_feature_layer must be from -3 to 3, got 4"),
        ("mistral3", {"vision_feature_layer": [-1]}, {}, r"vision_feature_layer must be from -3 to 3, got \[-1\]"),
        ("mistral3", {"spatial_merge_size": 9}, {}, "spatial_merge_size must be an integer from 1 to 8, got 9"),
        ("mistral3", {"image_token_index": 160}, {}, "image_token_index 160 is not in the vocabulary of 160"),
        ("pixtral", {}, {"hidden_act": "mish"}, "hidden_act must be one of gelu, silu"),
        ("pixtral", {"vision_feature_select_strategy": "default"}, {}, "vision_feature_select_strategy must be one of"),
    ],
)
def test_encoders_that_cannot_be_served_are_refused(
    family: str, changes: dict[str, Any], vision: dict[str, Any], message: str
) -> None:
    name, config = FAMILIES[family]
    own = config | changes | {"vision_config": VISION | vision}
    with pytest.raises(ModelError, match=message):
        spec_from_config({"architectures": [f"{name}ForConditionalGeneration"], **own})
