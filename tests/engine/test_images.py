"""Images in the engine against transformers, and bits that no schedule, cache or preemption changes."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams
from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.core.image_processing import PreparedImage
from quire.core.images import MAX_KEPT_BYTES, KeptPixels, PromptImage, cache_keys
from quire.core.sampling_params import as_sampling_params
from quire.core.token_ids import pack_tokens
from quire.engine.options import EngineOptions
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.engine.sizing import PIXEL_BYTES, ModelLimits, with_images
from quire.kernels.choice import choose_back_end
from quire.model.config import activation_bytes, num_parameters, spec_from_config
from quire.model.loader import load_model
from quire.model.source import read_folder
from quire.model.vision import flops
from quire.scheduling.image_encodings import ImageEncodings
from quire.scheduling.plan_builder import PlanBuilder
from quire_lab.sim.footprint import weight_bytes
from quire_lab.sim.hardware import HARDWARE
from quire_lab.sim.models import read_model
from quire_lab.sim.planning import plan_memory
from support.answers import Answer, answers_of
from support.faults import raising
from support.image_prompts import (
    GREEDY,
    IMAGE,
    PROCESSOR_FILE,
    RANDOM,
    answers,
    answers_alone,
    check_every_cut,
    check_memory_of_encoding,
    check_preempted,
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
NUM_ROWS = 16   # placeholders of an image
TEXT = {
    "model_type": "llama", "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": 56, "patch_size": 14,
}  # fmt: skip
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "patch_size": 7, "vision_use_head": False}
GEMMA = TEXT | {
    "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAVA = {"text_config": TEXT, "vision_config": CLIP, "image_token_index": IMAGE}
GEMMA3 = {
    "text_config": GEMMA, "vision_config": SIGLIP, "image_token_index": IMAGE, "mm_tokens_per_image": NUM_ROWS,
}  # fmt: skip
FAMILIES = {"llava": ("Llava", LLAVA), "gemma3": ("Gemma3", GEMMA3)}
SIZE = {"height": 56, "width": 56}
CPU = replace(HARDWARE["H100"], device="cpu")
PROCESSORS = {"llava": {"size": {"shortest_edge": 56}, "crop_size": SIZE}, "gemma3": {"size": SIZE}}


def make_reference(family: str = "llava", **changes: object) -> "transformers.PreTrainedModel":
    """Return a model of transformers with random parameters."""
    name, config = FAMILIES[family]
    return random_reference(name, config | changes)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(make_reference(request.param), path, PROCESSORS[request.param])
    return path


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save(make_reference(), path, PROCESSORS["llava"])
    return path


@cache
def picture(number: int) -> PreparedImage:
    return random_image(number, 56, 56, (4, 4))


def pixels(number: int) -> torch.Tensor:
    return values_of(picture(number))


def prompt(*parts: list[int] | int, salt: str | None = None) -> TokenizedPrompt:
    """Return a prompt of texts, lists of ids, and images, their numbers, which are their serials, too."""
    ids, images = list[int](), list[PromptImage]()
    for part in parts:
        if isinstance(part, int):
            images.append(PromptImage(len(ids), NUM_ROWS, part, picture(part)))
        ids += [IMAGE] * NUM_ROWS if isinstance(part, int) else part
    return TokenizedPrompt(None, pack_tokens(ids), salt, images=tuple(images))


PROMPTS = (
    prompt(text(1, 9), 1, text(2, 6)),
    prompt(1, text(3, 3)),
    prompt(text(1, 9), 2, text(4, 3), 1, text(5, 2)),
    prompt(text(6, 20)),
    prompt(text(7, 5), 3),
    prompt(text(1, 9), 1, 2, text(2, 1)),
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
        ("llava", {}),
        ("llava", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
        ("llava", {"vision_feature_layer": 1, "vision_config": CLIP | {"hidden_act": "gelu", "layer_norm_eps": 1e-3}}),
        ("llava", {"multimodal_projector_bias": False, "text_config": TEXT | {"model_type": "mistral"}}),
        ("gemma3", {}),
        ("gemma3", {"mm_tokens_per_image": 64, "vision_config": SIGLIP | {"layer_norm_eps": 1e-3}}),
    ],
    ids=["llava", "llava, full", "llava, first layer", "llava, mistral", "gemma3", "gemma3, not pooled"],
)
def test_a_tower_equals_transformers(
    family: str, changes: dict[str, object], back_end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_reference(family, **changes)
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, back_end=choose_back_end("cpu", back_end))
    assert decoder.vision is not None
    found = [torch.as_tensor(np.asarray(decoder.vision.encode(pixels(each).numpy()))).clone() for each in (1, 2, 1)]
    with torch.no_grad():
        expected = model.get_image_features(torch.stack([pixels(1), pixels(2)])).pooler_output
    torch.testing.assert_close(torch.stack(found[:2]), torch.stack(list(expected)), rtol=0, atol=TOLERANCE)
    assert torch.equal(found[2], found[0])
    assert decoder.progress[0] == 3 * decoder.vision.spec.tower.num_layers
    assert decoder.vision.layer_flops(NUM_ROWS) * decoder.vision.spec.tower.num_layers == flops(decoder.vision.spec)
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
    given = torch.stack([pixels(number) for number in range(8)])
    found = torch.stack([tower.encode(each.numpy()).float() for each in given])
    with torch.no_grad():
        theirs = torch.stack(list(rounded.get_image_features(given.bfloat16()).pooler_output)).float()
        exact = torch.stack(list(rounded.float().get_image_features(given).pooler_output))
    errors = [(each - exact).square().mean().sqrt() for each in (found, theirs)]
    assert 0 < errors[0] <= 1.2 * errors[1]


def test_packed_weights_have_the_tower(llava: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):                                              # written, and taken from there
        with open_llm(llava, packed_weights=str(tmp_path)) as llm:
            found.append((answers(llm, PROMPTS[:2]), llm._engine.model.weight_bytes))
    assert found[0] == found[1]


def test_an_encoder_beside_a_rounded_model_is_of_int8(folder: Path) -> None:
    check_rounded_encoder(folder, [picture(1), picture(2)])


def test_answers_equal_transformers(folder: Path) -> None:
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    params = replace(GREEDY, max_tokens=32, logprobs=160)
    with open_llm(folder, max_logprobs=160) as llm:
        found = generate(llm, PROMPTS[:3], params)
    for own, asked in zip(found, PROMPTS, strict=False):
        branch, num_prompt = own.outputs[0], len(asked.token_ids)
        given = torch.stack([pixels(image.serial) for image in asked.images])
        ids = torch.tensor([[*asked.token_ids, *branch.token_ids]])
        is_image = torch.zeros_like(ids, dtype=torch.bool)
        for image in asked.images:
            is_image[:, image.start : image.start + NUM_ROWS] = True
        with torch.no_grad():                           # image tokens in answers keep their own embeddings
            embeds = reference.get_input_embeddings()(ids)
            embeds[is_image] = torch.cat(list(reference.get_image_features(given).pooler_output))
            types = {"token_type_ids": is_image.long()} if "gemma" in reference.config.model_type else {}
            logits = reference(inputs_embeds=embeds, **types).logits[0, num_prompt - 1 : -1]
        expected = logits.log_softmax(-1)
        assert expected.argmax(-1).tolist() == list(branch.token_ids)
        ours = torch.tensor([[position[token].logprob for token in range(160)] for position in branch.logprobs or []])
        torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("old", ["vision_tower.", "language_model.model.", "multi_modal_projector."])
def test_names_of_other_checkpoints_are_read(old: str, folder: Path, tmp_path: Path, alone: list[list[Answer]]) -> None:
    """As published: vision_tower.vision_model.; as transformers 5 has them in memory: model.language_model."""
    new = {
        "vision_tower.": "vision_tower.vision_model.", "language_model.model.": "model.language_model.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace(old, new[old], 1): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    for name in ("config.json", PROCESSOR_FILE):
        (tmp_path / name).write_text((folder / name).read_text())
    with open_llm(tmp_path) as llm:
        assert answers(llm, PROMPTS[:1]) == alone[:1]


# --- bits -------------------------------------------------------------------------------------------------------------


def test_batched_requests_have_their_bits(folder: Path, alone: list[list[Answer]]) -> None:
    with open_llm(folder) as llm:
        assert answers(llm, PROMPTS, PARAMS) == alone
        assert answers(llm, PROMPTS[::-1], PARAMS[::-1]) == alone[::-1]    # all found in the cache
        images = llm._engine.engine.scheduler.planner.images
        assert images is not None
        assert images.num_encoded == 3


def test_batched_requests_of_a_rounded_model_have_their_bits(folder: Path, alone: list[list[Answer]]) -> None:
    with open_llm(folder, quantization="int8", max_num_batched_tokens=20) as llm:
        by_themselves = [answers(llm, [each], params)[0] for each, params in zip(PROMPTS, PARAMS, strict=True)]
    assert by_themselves != alone
    with open_llm(folder, quantization="int8") as llm:
        assert answers(llm, PROMPTS, PARAMS) == by_themselves


@pytest.mark.parametrize("mode", ["gather", "reduce"])
@pytest.mark.usefixtures("forked_processes")
def test_ranks_have_the_bits_of_requests_alone(mode: str, folder: Path, alone: list[list[Answer]]) -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_mode": mode}
    small = {"image_cache_memory": NUM_ROWS * 48 * 4}       # one image's: the others are dropped, on all ranks
    with open_llm(folder, max_num_batched_tokens=24, enable_prefix_caching=False, **settings, **small) as llm:
        by_themselves = [answers(llm, [each], params)[0] for each, params in zip(PROMPTS, PARAMS, strict=True)]
        if mode == "gather":
            assert by_themselves == alone
        options = EngineOptions(str(folder), max_model_len=128, **settings)
        plans = [plan_memory(read_model(str(folder)), CPU, options, num_ranks) for num_ranks in (1, 2)]
        assert llm._engine.ready.weights_bytes == plans[1].weight_bytes
        assert plans[1].vision_weight_bytes == 2 * plans[0].vision_weight_bytes
        assert answers(llm, PROMPTS, PARAMS) == by_themselves


def test_chunks_with_cuts_at_every_place_have_the_bits_of_one(folder: Path, alone: list[list[Answer]]) -> None:
    check_every_cut(folder, PROMPTS[2], alone[2])


def test_prefix_hits_before_inside_and_behind_images_have_the_bits_of_none(
    folder: Path, alone: list[list[Answer]]
) -> None:
    with open_llm(folder) as llm:
        for index, (each, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            own = each.salted(str(index))
            ids, images = list(own.token_ids), own.images
            for cut in range(1, len(ids)):
                if any(image.start < cut < image.start + NUM_ROWS for image in images):
                    continue                                    # a request has whole images
                first = tuple(image for image in images if image.start < cut)
                salted = own.salted(f"{index} {cut}")
                generate(llm, [salted._replace(token_ids=pack_tokens(ids[:cut]), images=first)])
                (found,) = generate(llm, [salted], params)
                assert answers_of(found) == alone[index], cut
                assert found.num_cached_tokens == cut - (cut == len(ids))
            generate(llm, [own], params)
            (found,) = generate(llm, [own], params)             # all but the last token, which may be of an image
            assert (found.num_cached_tokens, answers_of(found)) == (len(ids) - 1, alone[index])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_have_their_bits(mode: str, folder: Path) -> None:
    assert check_preempted(folder, mode, PROMPTS, PARAMS, NUM_ROWS * 48 * 4) > 0


def test_forks_beams_and_drafts_have_the_bits_of_none(folder: Path) -> None:
    several = replace(RANDOM, n=3, max_tokens=12)
    longer = replace(GREEDY, max_tokens=24)
    with open_llm(folder) as llm:
        one_by_one = [
            answers(llm, [each], replace(several, n=1, seed=None, temperature=0.0))[0] for each in PROMPTS[:3]
        ]
        forked = answers(llm, PROMPTS[:3], several)
        greedy = answers(llm, PROMPTS, longer)
        beams = llm._finish_all(
            llm._prepare(list(PROMPTS[:3]), as_sampling_params(BEAM), beam=BEAM), use_tqdm=False
        )
    assert [len(each) for each in forked] == [3] * 3
    with open_llm(folder, max_num_batched_tokens=13, enable_prefix_caching=False) as llm:
        assert answers(llm, PROMPTS[:3], several) == forked
        own = llm._finish_all(llm._prepare(list(PROMPTS[:3]), as_sampling_params(BEAM), beam=BEAM), use_tqdm=False)
        assert [answers_of(each) for each in own] == [answers_of(each) for each in beams]
        assert answers(llm, PROMPTS[:3], replace(several, n=1, seed=None, temperature=0.0)) == one_by_one
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with open_llm(folder, speculative_config=drafts) as llm:
        assert answers(llm, PROMPTS, longer) == greedy


BEAM = BeamSearchParams(beam_width=3, max_tokens=6)


def test_text_on_a_model_of_images_has_the_bits_of_the_text_model(llava: Path, tmp_path: Path) -> None:
    tensors = load_file(llava / "model.safetensors")
    own = {name.removeprefix("language_model."): each for name, each in tensors.items() if name.startswith("language")}
    save_file(own, tmp_path / "model.safetensors")
    transformers.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    prompts = [prompt(text(seed, 5 + seed)) for seed in range(4)]
    with open_llm(tmp_path) as llm:
        expected = answers(llm, prompts, RANDOM)
        with pytest.raises(InvalidRequestError, match="images cannot be used: the model reads text alone"):
            generate(llm, PROMPTS[:1])
    with open_llm(llava) as llm:
        assert answers(llm, prompts, RANDOM) == expected


# --- identity ---------------------------------------------------------------------------------------------------------


def test_images_of_one_size_never_meet_in_the_cache(folder: Path, alone: list[list[Answer]]) -> None:
    asked = [prompt(text(1, 9), number, text(2, 6)) for number in (1, 2)]
    swapped = [prompt(1, 2, text(2, 3)), prompt(2, 1, text(2, 3))]
    with open_llm(folder) as llm:
        found = [generate(llm, [each])[0] for each in (*asked, *swapped, asked[0], swapped[1])]
        again = generate(llm, [asked[0].salted("other")])[0]
    assert [each.num_cached_tokens for each in found] == [0, 9, 0, 0, len(asked[0].token_ids) - 1, 2 * NUM_ROWS + 2]
    assert again.num_cached_tokens == 0
    same = [answers_of(each) for each in found]
    assert same[0] == same[4] == answers_of(again) == alone[0]
    assert same[3] == same[5]
    assert same[0] != same[1]
    assert same[2] != same[3]


def test_the_cache_is_told_serials_and_the_model_image_tokens() -> None:
    asked = prompt(text(1, 2), 7, text(2, 1), 0)
    keys = list(cache_keys(asked.token_ids, asked.images))
    assert keys == [*text(1, 2), *[-8] * NUM_ROWS, *text(2, 1), *[-1] * NUM_ROWS]
    assert list(asked.token_ids).count(IMAGE) == 2 * NUM_ROWS


def test_an_engine_and_its_client_keep_the_same_pixels() -> None:
    most, drawn = 5000, np.random.default_rng(0)
    client, engine, num_sent = KeptPixels(most), KeptPixels(most), 0
    pictures = [random_image(number, 7 * (1 + number % 4), 14, (1, 1)) for number in range(12)]
    for _ in range(300):
        numbers = drawn.integers(len(pictures), size=drawn.integers(4))
        images = tuple(PromptImage(0, 1, int(each), pictures[each]) for each in numbers)
        wire = client.without_kept(images)
        client.sent(images)
        num_sent += sum(bool(each.prepared.pixels) for each in wire)
        assert engine.received(wire) == images
        assert list(client.images) == list(engine.images)
        assert client.num_bytes == engine.num_bytes == sum(len(each.pixels) for each in engine.images.values()) <= most
        assert not any(each.pixels for each in client.images.values())
    assert 12 < num_sent < 300
    large = (PromptImage(0, 1, 99, random_image(1, 50, 50, (1, 1))),)
    for _ in range(2):
        assert client.without_kept(large) == large
        client.sent(large)
        assert engine.received(large) == large
        assert (client.num_bytes, engine.num_bytes) == (0, 0)


# --- faults, bounds, bad input ----------------------------------------------------------------------------------------


def test_a_failing_encoder_fails_its_request_alone(folder: Path, alone: list[list[Answer]]) -> None:
    with open_llm(folder) as llm:
        tower = llm._engine.model.vision  # type: ignore[attr-defined]
        encode, bad = tower.encode, pixels(3).numpy()
        tower.encode = lambda given: raising(ValueError)() if np.array_equal(given, bad) else encode(given)
        found, failed = dict[str, list[Answer]](), []
        engine, prepared = llm._engine.engine, llm._prepare(list(PROMPTS), list(PARAMS))
        for each in prepared:
            engine.add(each.request)
        ended = dict[int, list[int]]()
        while engine.scheduler.has_requests:
            try:
                deltas = engine.step()
            except ValueError as error:
                deltas = engine.recover(error)
            for delta in deltas:
                ended.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.error is not None:
                    failed.append(delta.request_id)
            engine.scheduler.check()
        assert not found
        assert failed == [prepared[4].request.request_id]
        for index in (0, 1, 2, 3, 5):
            assert tuple(ended[prepared[index].request.request_id]) == alone[index][0].token_ids


def test_random_weights_have_a_tower(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", PROCESSOR_FILE):
        (tmp_path / name).write_text((folder / name).read_text())
    with open_llm(tmp_path, load_format="dummy") as llm:
        first, second = answers(llm, [prompt(1, text(2, 3)), prompt(2, text(2, 3))])
    assert first != second


def test_encodings_are_bounded_and_charged(llava: Path) -> None:
    with open_llm(llava) as llm:
        inputs = llm._engine.ready.images
    assert inputs is not None
    spec = read_folder(llava).spec
    assert spec.vision is not None
    assert (inputs.settings.family, inputs.settings.image_token_id) == ("llava", IMAGE)
    assert (inputs.num_tokens, inputs.size) == (16, (56, 56))
    assert inputs.cost >= 1
    assert inputs.max_tokens == (256 << 20) // (48 * 4)
    images, step = ImageEncodings(replace_struct(inputs, max_tokens=40, cost=5)), PlanBuilder()
    asked = prompt(text(1, 2), 1, 2, 3, text(2, 2)).images
    assert images.fit(step, asked, 0, 20, 20) == (2 + NUM_ROWS + 2 - 5, 5)         # the budget left
    assert images.fit(step, asked, 0, 52, 60) == (2 + 2 * NUM_ROWS, 5)             # no room for the third one
    assert [each.serial for each in step.plan.encodings] == [1, 2]
    later = PlanBuilder()
    assert images.fit(later, asked, 20, 32, 3) == (14, 0)                          # the third one costs too much
    assert images.fit(later, asked, 34, 18, 3) == (1, 5)                           # but is the first of the step now
    assert (later.plan.dropped_images, [each.serial for each in later.plan.encodings]) == ([1], [3])
    assert images.fit(later, asked, 2, 16, 40) == (0, 0)                           # no room: the step uses 2 and 3
    images.check()
    images.undo([later])
    images.check()
    again = PlanBuilder()
    assert images.fit(again, asked, 34, 18, 3) == (1, 5)
    assert (again.plan.dropped_images, [each.serial for each in again.plan.encodings]) == ([1, 3], [3])
    assert (images.num_encoded, images.num_found) == (4, 1)


def test_images_whose_tokens_see_each_other_are_not_cut(llava: Path) -> None:
    with open_llm(llava) as llm:
        inputs = llm._engine.ready.images
    inputs = replace_struct(inputs, cost=1, is_whole=True)
    asked = prompt(text(1, 2), 1, text(2, 3), 2, text(2, 2)).images                  # at [2, 18) and [21, 37)
    expected = {1: 1, 3: 2, 17: 2, 19: 18, 20: 19, 24: 21, 37: 21, 39: 37}
    assert {each: ImageEncodings(inputs).fit(PlanBuilder(), asked, 0, each, each)[0] for each in expected} == expected
    images = ImageEncodings(inputs)
    assert images.fit(PlanBuilder(), asked, 2, 1, 1) == (NUM_ROWS, 1)                # to its end, past the budget
    assert images.fit(PlanBuilder(), asked, 10, 1, 1) == (8, 0)                      # the rest of one that was found
    assert images.fit(PlanBuilder(), asked, 36, 2, 9) == (2, 1)


def replace_struct(inputs: Any, **changes: Any) -> Any:  # noqa: ANN401
    return structs.replace(inputs, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 30}, r"images\[0\]: placeholders \[30, 46\) of a prompt of 31 tokens"),
        ({"start": 8}, r"images\[0\]: placeholders \[8, 24\) must be the token 159"),
        ({"num_tokens": 15}, r"images\[0\]: must have 16 placeholders, got 15"),
        ({"serial": -1}, r"images\[0\]: serial must be from 0"),
        ({"serial": 2**31}, r"images\[0\]: serial must be from 0"),
        ({"prepared": random_image(1, 56, 57, (4, 4))}, r"pixels must be 56 x 56 in 9408 bytes, got 56 x 57 in 9576"),
        ({"prepared": PreparedImage(56, 56, (4, 4), b"1234")}, r"in 9408 bytes, got 56 x 56 in 4 bytes"),
    ],
)
def test_images_that_do_not_fit_are_refused(change: dict[str, Any], message: str, shared: LLM) -> None:
    asked = PROMPTS[0]
    wrong = replace_struct(asked.images[0], **change)
    with pytest.raises(InvalidRequestError, match=message) as refused:
        generate(shared, [asked._replace(images=(wrong,))])
    assert refused.value.param == "images"


def test_image_tokens_outside_of_images_are_text(shared: LLM) -> None:
    (found,) = generate(shared, [prompt(text(1, 3), 1, [IMAGE], text(2, 2))])
    (as_text,) = generate(shared, [prompt(text(1, 3), [IMAGE] * NUM_ROWS, [IMAGE], text(2, 2))])
    assert as_text.num_cached_tokens == 3
    assert answers_of(found) != answers_of(as_text)


@pytest.fixture(scope="module")
def shared(llava: Path) -> Iterator[LLM]:
    with open_llm(llava) as llm:
        yield llm


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"record": "run.quirelog"}, "they are not served with record"),
        ({"memory_policy": "contiguous-max"}, "they are not served with memory_policy 'contiguous-max'"),
    ],
)
def test_settings_without_images_say_so(
    settings: dict[str, Any], reason: str, llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_llm(llava, **settings) as llm:
        with pytest.raises(InvalidRequestError, match=reason):
            generate(llm, PROMPTS[:1])
        assert llm._engine.ready.images is None
        assert llm._engine.ready.no_images_reason == reason
        assert generate(llm, PROMPTS[3:4])[0].finished


def test_files_without_a_processor_serve_text_alone(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with open_llm(tmp_path) as llm:
        with pytest.raises(InvalidRequestError, match="images cannot be used: the settings of the model's image proc"):
            generate(llm, PROMPTS[:1])
        assert generate(llm, PROMPTS[3:4])[0].finished
    assert "images of requests are refused" in caplog.text


def test_a_plan_tells_what_an_image_takes(llava: Path) -> None:
    found = plan_memory(read_model(str(llava)), HARDWARE["H100"], EngineOptions(str(llava), max_model_len=128))
    assert (found.image_tokens, found.image_bytes, found.vision_weight_bytes) == (0, 0, 0)     # not loaded there
    found = plan_memory(read_model(str(llava)), CPU, EngineOptions(str(llava), max_model_len=128))
    vision = load_model(llava, back_end=choose_back_end("cpu")).weight_bytes
    text = weight_bytes(replace(read_folder(llava).spec, vision=None), "float32")
    expected = (NUM_ROWS, NUM_ROWS * 48 * 4, vision - text)
    assert (found.image_tokens, found.image_bytes, found.vision_weight_bytes) == expected
    assert (found.most_image_tokens, found.pixel_bytes) == (NUM_ROWS, 2 * MAX_KEPT_BYTES)


def test_encoding_takes_no_more_memory_than_is_planned_for(folder: Path) -> None:
    check_memory_of_encoding(folder, picture(1))


def test_the_kv_cache_leaves_room_for_images(llava: Path) -> None:
    vision = read_folder(llava).spec.vision
    assert vision is not None
    options = EngineOptions(str(llava), image_cache_memory="1MiB", data_parallel_size=2)
    limits, active = ModelLimits(256, 768, None, scratch_bytes=5), activation_bytes(vision, NUM_ROWS, 4)
    taken = 5 + (1 << 20) + active + PIXEL_BYTES
    assert with_images(options, limits, vision, NUM_ROWS, 4, 2 * taken + 1).scratch_bytes == taken
    expected = f"16 tokens takes {active} bytes while it is encoded, and image_cache_memory 1048576, 2 times .* kept"
    with pytest.raises(ConfigError, match=expected):
        with_images(options, limits, vision, NUM_ROWS, 4, 2 * taken)
    model, machine = read_model(str(llava)), replace(CPU, memory_bytes=(270 << 20) + PIXEL_BYTES)
    plans = [plan_memory(model, machine, EngineOptions(image_cache_memory=size)) for size in ("256MiB", "1MiB")]
    assert 0 < plans[0].cache.num_blocks < plans[1].cache.num_blocks


def test_settings_of_the_cache_are_checked(llava: Path) -> None:
    with pytest.raises(ConfigError, match="image_cache_memory 3071 holds no image of the model: one takes 3072 bytes"):
        open_llm(llava, image_cache_memory=3071)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer must be from -3 to 3"),
        ({"vision_feature_layer": -4}, "vision_feature_layer must be from -3 to 3, got -4"),
        ({"vision_feature_layer": 0}, "vision_feature_layer 0 is not supported yet"),
        ({"image_token_index": 160}, "image_token_index 160 is not in the vocabulary of 160"),
        ({"vision_feature_select_strategy": "first"}, "vision_feature_select_strategy must be one of default, full"),
        ({"vision_config": CLIP | {"patch_size": 57}}, "image_size 56 and patch_size 57 must give 1 to 65536 patches"),
        ({"vision_config": CLIP | {"hidden_act": "mish"}}, "hidden_act must be one of"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config({"architectures": ["LlavaForConditionalGeneration"], **LLAVA, **changes})


def test_the_operations_of_an_image_are_those_of_clip() -> None:
    """LLaVA 1.5's: CLIP-L of 336 pixels, 23 of its layers, and the projector."""
    clip = {
        "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
    }  # fmt: skip
    config = {"vision_config": clip, "text_config": {"vocab_size": 32_064}}
    spec = spec_from_config({"architectures": ["LlavaForConditionalGeneration"], **config})
    assert spec.vision is not None
    assert spec.vision.num_tokens == 576
    assert 0.35e12 < flops(spec.vision) < 0.40e12
