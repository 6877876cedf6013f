"""Prompts with images for an engine in the process, past the reading of files and texts."""

import json
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.core.image_processing import PreparedImage, image_settings, pixel_values
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.model.config import activation_bytes
from quire.model.loader import load_model
from quire.model.quantization import Method, QuantizationOptions
from quire.model.source import read_folder
from quire_lab.sim.footprint import weight_bytes
from support.answers import Answer, answers_of
from support.random_parameters import randomize

if TYPE_CHECKING:
    import transformers

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
RANDOM = replace(GREEDY, temperature=0.9, seed=5, repetition_penalty=1.3)

IMAGE, VOCAB_SIZE = 159, 160    # the image token, and the ids of the models of these tests
PROCESSOR_FILE = "preprocessor_config.json"
NORMALIZED = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.4]}  # all processors of these tests do so
_SIZE = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_SETTINGS = image_settings("a test", _SIZE | NORMALIZED, "llava", image_token_id=0, image_size=28, patch_size=14)


def save(model: "transformers.PreTrainedModel", folder: Path, processor: Mapping[str, object]) -> None:
    """Write a model, and the file of its image processor."""
    model.save_pretrained(folder)
    (folder / PROCESSOR_FILE).write_text(json.dumps({**processor, **NORMALIZED}))


def random_reference(name: str, config: Mapping[str, object]) -> "transformers.PreTrainedModel":
    """Return a model of transformers with random parameters. `name`: what its classes begin with."""
    import transformers  # an extra

    torch.manual_seed(3)
    make, settings = (getattr(transformers, name + end) for end in ("ForConditionalGeneration", "Config"))
    model: transformers.PreTrainedModel = make(settings(**config)).eval()
    randomize(model)
    return model


def random_image(seed: int, height: int, width: int, grid: tuple[int, int]) -> PreparedImage:
    """Return random pixels."""
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return PreparedImage(height, width, grid, pixels.numpy().tobytes())


def values_of(image: PreparedImage) -> torch.Tensor:
    """Return the input of an encoder for pixels, [3, height, width]."""
    return torch.from_numpy(pixel_values(_SETTINGS, image))


def check_rounded_encoder(folder: Path, pictures: Sequence[PreparedImage], most: float = 0.03) -> None:
    """Check the rows of an encoder beside a model that is rounded to int8 or int4: of int8, near those of floats.

    `most`: the relative error that its rounded layers may add up to.
    """
    source, cpp = read_folder(folder), choose_back_end("cpu", "cpp")

    def rows(method: Method | None, back_end: BackEnd = cpp) -> torch.Tensor:
        quantization = source.quantization(QuantizationOptions(method))
        model = load_model(folder, back_end=back_end, quantization=quantization)
        assert model.vision is not None
        if back_end is cpp:
            assert model.weight_bytes == weight_bytes(model.spec, "float32", quantization=quantization)
        given = [values_of(each).numpy() for each in pictures]
        return torch.cat([torch.as_tensor(np.asarray(model.vision.encode(each)).copy()) for each in given])

    exact, rounded = rows(None), rows("int8")
    assert torch.equal(rows("int4"), rounded)
    for each in (rounded, rows("int8", choose_back_end("cpu", "reference"))):
        error = (each - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert 0.005 < error < most


def answers_alone(
    folder: Path, prompts: Sequence[TokenizedPrompt], params: Sequence[SamplingParams]
) -> list[list[Answer]]:
    """Return the answers of prompts, one request after the other, without a prefix cache."""
    with open_llm(folder, enable_prefix_caching=False) as llm:
        return [answers(llm, [each], own)[0] for each, own in zip(prompts, params, strict=True)]


def check_greedy_answers(
    folder: Path, prompts: Sequence[TokenizedPrompt], logits: Callable[[TokenizedPrompt, torch.Tensor], torch.Tensor]
) -> None:
    """Check 32 tokens behind each prompt, none of them an image's, and the logprobs of all tokens, beside a reference.

    logits: for a prompt, and the ids of it and its answer, int64 [1, num_tokens]: float32 [1, num_tokens, VOCAB_SIZE].
    """
    no_image = {IMAGE: -100.0}  # transformers would take it for a placeholder
    params = replace(GREEDY, max_tokens=32, logprobs=VOCAB_SIZE, logit_bias=no_image)
    with open_llm(folder, max_logprobs=VOCAB_SIZE) as llm:
        found = generate(llm, prompts, params)
    for own, asked in zip(found, prompts, strict=True):
        branch, num_prompt = own.outputs[0], len(asked.token_ids)
        with torch.no_grad():
            expected = logits(asked, torch.tensor([[*asked.token_ids, *branch.token_ids]]))[0, num_prompt - 1 : -1]
        expected = expected.log_softmax(-1)
        assert expected[:, :IMAGE].argmax(-1).tolist() == list(branch.token_ids)
        positions = branch.logprobs or []
        ours = torch.tensor([[each[token].logprob for token in range(VOCAB_SIZE)] for each in positions])
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def check_every_cut(folder: Path, prompt: TokenizedPrompt, alone: list[Answer]) -> None:
    """Check that a prompt in steps of any number of tokens has the bits of one step."""
    for budget in range(1, len(prompt.token_ids)):
        with open_llm(folder, max_num_batched_tokens=budget, max_num_seqs=1, enable_prefix_caching=False) as llm:
            assert answers(llm, [prompt]) == [alone], budget


def check_preempted(
    folder: Path, mode: str, prompts: Sequence[TokenizedPrompt], params: Sequence[SamplingParams],
    image_cache_memory: int, *, num_blocks: int = 13, max_tokens: int = 40,
) -> int:  # fmt: skip
    """Check preempted requests, in a pool of blocks for little more than one; return the number of encodings again.

    image_cache_memory: bytes, of about one image: pixels are needed again.
    """
    settings: dict[str, Any] = {"num_kv_blocks": num_blocks, "image_cache_memory": image_cache_memory}
    if mode == "swap":
        settings["num_swap_blocks"] = 3 * num_blocks
    longer = [replace(each, max_tokens=max_tokens) for each in params]
    with open_llm(folder, enable_prefix_caching=False) as llm:
        alone = answers(llm, prompts, longer)
    with open_llm(
        folder, max_model_len=8 * num_blocks, max_num_batched_tokens=24, preemption_mode=mode, **settings
    ) as llm:
        assert answers(llm, prompts, longer) == alone
        assert sum(llm._engine.engine.kv_stats().preemptions.values()) > 0
        images = llm._engine.engine.scheduler.planner.images
        assert images is not None
        rows = llm._engine.engine.executor.worker.compute.images  # type: ignore[attr-defined]
        assert rows.num_bytes <= image_cache_memory
        return images.num_encoded - len({each.serial for prompt in prompts for each in prompt.images})


def check_ranks(
    folder: Path, prompts: Sequence[TokenizedPrompt], params: Sequence[SamplingParams], alone: list[list[Answer]]
) -> None:
    """Check that two ranks have the answers of one. Each encodes images by itself."""
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_mode": "gather"}
    with open_llm(folder, max_num_batched_tokens=24, enable_prefix_caching=False, **settings) as llm:
        assert answers(llm, prompts, params) == alone
        assert (llm._engine.ready.images is not None, llm._engine.ready.no_images_reason) == (True, "")


def check_memory_of_encoding(folder: Path, picture: PreparedImage) -> None:
    """Check that arrays take no more than what is planned for, and not a small part of that."""
    tower = load_model(folder, back_end=choose_back_end("cpu", "cpp")).vision
    assert tower is not None
    encode: Callable[..., Any] = tower.encode if tower.spec.tiles is None else partial(tower.encode, grid=picture.grid)
    num_rows = len(np.asarray(encode(pixel_values(_SETTINGS, picture))))
    tracemalloc.start()
    try:
        encode(pixel_values(_SETTINGS, picture))
        found = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found <= activation_bytes(tower.spec, num_rows, 4) < 8 * found


def text(seed: int, count: int) -> list[int]:
    """Return random ids of tokens that are no image's."""
    return torch.randint(5, 150, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(
    llm: LLM, prompts: Sequence[TokenizedPrompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> list[RequestOutput]:
    """Return the outputs, in order; the scheduler's invariants hold behind them."""
    found = llm._finish_all(llm._prepare(list(prompts), params), use_tqdm=False)
    llm._engine.engine.scheduler.check()
    return found


def answers(llm: LLM, prompts: Sequence[TokenizedPrompt], params: Any = GREEDY) -> list[list[Answer]]:  # noqa: ANN401
    """Return the answers of the outputs of `generate`."""
    return [answers_of(each) for each in generate(llm, prompts, params)]


def open_llm(folder: Path, **settings: Any) -> LLM:  # noqa: ANN401 (any setting)
    """Return an engine with few blocks, for prompts of ids."""
    sizes = {"num_kv_blocks": 48, "max_num_seqs": 8, "block_size": 8}
    return LLM(folder, skip_tokenizer_init=True, **{**sizes, **settings})
