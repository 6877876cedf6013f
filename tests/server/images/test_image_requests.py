"""Images in requests of the three APIs and of `LLM.chat`: prompts and answers are those of transformers."""


import asyncio
import os
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.core.errors import InvalidRequestError
from quire.engine.options import EngineOptions
from quire.server.lifecycle import supervise_engine
from support.agent_bodies import messages_body, responses_body
from support.forked_engines import fork_engine
from support.openai_server import NAME, OpenAIServer, openai_server
from support.small_vision import (
    NUM_TOKENS,
    write_gemma3,
    write_llava,
    write_llava_onevision,
    write_mistral3,
    write_qwen_vl,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_ANSWER = 6
LIMITS = {"num_kv_blocks": 160, "block_size": 8, "max_num_seqs": 4}
SIZES = {"one": (40, 33), "two": (29, 60), "three": (64, 64)}


def picture(name: str) -> Image.Image:
    width, height = SIZES[name]
    pixels = np.random.default_rng(len(name)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_of(name: str) -> str:
    buffer = BytesIO()
    picture(name).save(buffer, "PNG")
    return b64encode(buffer.getvalue()).decode()


def url_of(name: str) -> str:
    return f"data:image/png;base64,{data_of(name)}"


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(name), "detail": "auto"}}


def block(name: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data_of(name)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[OpenAIServer]:
    with openai_server(EngineOptions(model=str(folder), **LIMITS), max_images=3) as server:
        yield server


@pytest.fixture
def server(running: OpenAIServer) -> Iterator[OpenAIServer]:
    yield running
    running.wait_until(running.is_idle)
    assert not running.service.admission.images.num_client_bytes, "memory of images is counted"


@pytest.fixture
def client(server: OpenAIServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropics(server: OpenAIServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


class Reference:
    """Prompts and greedy answers of transformers' processor and model."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)

    def answer(self, prompt: str, *names: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a text with a placeholder for each image, and those of the answer."""
        expanded = prompt.replace("<image>", "<image>" * NUM_TOKENS)
        ids = self._tokenizer(expanded, add_special_tokens=False)["input_ids"]
        pixels = self._processor([picture(name) for name in names], return_tensors="pt")["pixel_values"]
        settings = {"max_new_tokens": NUM_ANSWER, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
        whole = self._model.generate(input_ids=torch.tensor([ids]), pixel_values=pixels, **settings)[0]
        return ids, whole[len(ids) :].tolist()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


CHATS = {
    "one": (
        [{"role": "user", "content": [text("what is it?"), image("one")]}],
        "USER: <image>\nwhat is it? ASSISTANT:",
    ),
    "two": (
        [{"role": "user", "content": [image("one"), text("and"), image("two")]}],
        "USER: <image>\n<image>\nand ASSISTANT:",
    ),
    "turns": (
        [
            {"role": "user", "content": [image("three")]}, {"role": "assistant", "content": "noise"},
            {"role": "user", "content": [text("and this"), image("one")]},
        ],
        "USER: <image>\n ASSISTANT: noise USER: <image>\nand this ASSISTANT:",
    ),
}  # fmt: skip
NAMES = {"one": ["one"], "two": ["one", "two"], "turns": ["three", "one"]}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize("name", CHATS)
def test_chats_have_the_tokens_of_transformers(name: str, client: openai.OpenAI, reference: Reference) -> None:
    messages, prompt = CHATS[name]
    prompt_ids, expected = reference.answer(prompt, *NAMES[name])
    for _ in range(2):      # the second one from the cache
        answer = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=NUM_ANSWER, extra_body=GREEDY,  # type: ignore[arg-type]
        )  # fmt: skip
        (choice,) = answer.choices
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt_ids)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == NUM_TOKENS * len(NAMES[name])
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt_ids) - 1


def test_an_image_of_another_content_and_order_is_another_prompt(client: openai.OpenAI, reference: Reference) -> None:
    for names in (["two", "one"], ["one", "three"], ["three", "two"], ["one", "two"]):
        content = [*map(image, names), text("and")]
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": content}], max_tokens=NUM_ANSWER,  # type: ignore[arg-type]
            extra_body=GREEDY,
        )  # fmt: skip
        expected = reference.answer("USER: <image>\n<image>\nand ASSISTANT:", *names)[1]
        assert (answer.choices[0].model_extra or {})["token_ids"] == expected


def test_two_salts_share_no_image(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [image("two"), text("salted")]}]
    for number, cached in enumerate([False, False, True]):
        body = GREEDY | {"cache_salt": f"salt {min(number, 1)}"}
        answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=1, extra_body=body)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert bool(answer.usage.prompt_tokens_details.cached_tokens) is cached


def test_a_placeholder_that_a_client_writes_is_text(client: openai.OpenAI, server: OpenAIServer) -> None:
    for content in (
        [text("what is <image> and "), image("one")], [text("<image><image>")], "<image>",
        [image("one"), text("<image>")],
    ):  # fmt: skip
        messages: Any = [{"role": "user", "content": content}]
        tokens = server.ask("/tokenize", messages=messages)["tokens"]
        image_id = server.service.client.ready.images.settings.image_token_id  # type: ignore[union-attr]
        num_images = 0 if isinstance(content, str) else sum(part["type"] == "image_url" for part in content)
        assert tokens.count(image_id) == NUM_TOKENS * num_images
        answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(tokens)


def test_responses_have_images_in_messages_and_in_outputs_of_tools(client: openai.OpenAI) -> None:
    shot: Any = {"type": "input_image", "image_url": url_of("one"), "detail": "auto"}
    said: Any = {"role": "user", "content": [{"type": "input_text", "text": "what is it?"}, shot]}
    response = client.responses.create(model=NAME, input=[said], max_output_tokens=2)
    assert response.usage is not None
    plain: Any = {"role": "user", "content": "what is it?"}
    without = client.responses.create(model=NAME, input=[plain], max_output_tokens=2)
    assert without.usage is not None
    assert response.usage.input_tokens == without.usage.input_tokens + NUM_TOKENS + 1   # and a line break
    call: Any = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    usages = []
    for output in ([{"type": "input_text", "text": "seen"}], [{"type": "input_text", "text": "seen"}, shot]):
        result: Any = {"type": "function_call_output", "call_id": "a", "output": output}
        response = client.responses.create(model=NAME, input=[plain, call, result], max_output_tokens=2)
        assert response.usage is not None
        usages.append(response.usage.input_tokens)
    assert usages[1] - usages[0] > NUM_TOKENS


def test_messages_have_images_also_in_results_of_tools(anthropics: anthropic.Anthropic) -> None:
    marked = block("one") | {"cache_control": {"type": "ephemeral"}}
    counts = []
    for content in ([text("look")], [text("look"), marked]):
        messages: Any = [{"role": "user", "content": content}]
        answer = anthropics.messages.create(model=NAME, max_tokens=2, messages=messages)
        read, written = answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens
        counts.append(answer.usage.input_tokens + (read or 0) + (written or 0))
        assert anthropics.messages.count_tokens(model=NAME, messages=messages).input_tokens == counts[-1]
    assert counts[1] - counts[0] == NUM_TOKENS + 1
    call: Any = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    for is_error in (False, True):
        seen = [marked, text("seen")]
        result: Any = {"type": "tool_result", "tool_use_id": "a", "content": seen, "is_error": is_error}
        answer = anthropics.messages.create(
            model=NAME, max_tokens=2, messages=[
                {"role": "user", "content": "go"}, {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ],
        )  # fmt: skip
        assert answer.usage.output_tokens


def test_coding_agents_bodies_have_screenshots(tmp_path: Path) -> None:
    options = EngineOptions(model=str(write_llava(tmp_path, 8192)), **LIMITS | {"num_kv_blocks": 1024})

    def used(path: str, body: dict[str, Any]) -> tuple[int, int]:
        """Return the tokens of a prompt, and those that were cached."""
        usage = server.ask(path, **body | {"model": NAME, "stream": False})["usage"]
        if path == "/v1/responses":
            return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        read = usage["cache_read_input_tokens"] or 0
        return usage["input_tokens"] + read + (usage["cache_creation_input_tokens"] or 0), read

    def with_output(content: list[Any]) -> dict[str, Any]:
        messages, responses = messages_body(2, 2), responses_body(2, 2)
        messages["messages"][2]["content"][1]["content"] = content
        responses["input"][10]["output"] = content
        return {"/v1/messages": messages, "/v1/responses": responses}

    with openai_server(options) as server:
        for path, said, shots in (
            ("/v1/messages", text("read"), [block("one"), block("two")]),
            ("/v1/responses", {"type": "input_text", "text": "read"},
             [{"type": "input_image", "image_url": url_of(name), "detail": "high"} for name in ("one", "two")]),
        ):  # fmt: skip
            without, _ = used(path, with_output([said])[path])
            first, _ = used(path, with_output([said, shots[0]])[path])
            again, found = used(path, with_output([said, shots[0]])[path])
            other, shared = used(path, with_output([said, shots[1]])[path])
            assert first == again == other >= without + NUM_TOKENS
            assert found >= first - 2 * LIMITS["block_size"] > shared + NUM_TOKENS > NUM_TOKENS


def test_errors_name_the_part(client: openai.OpenAI, anthropics: anthropic.Anthropic) -> None:
    broken: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    history: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=NAME, messages=[*history, {"role": "user", "content": [text("a"), broken]}]  # type: ignore[list-item]
        )
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["param"] == "messages[2].content[1]"
    assert caught.value.body["message"].startswith("messages[2].content[1] is no image in one of the formats")
    with pytest.raises(openai.BadRequestError, match="a request may have 3 \\(max_images\\)"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": [image("one")] * 4}])  # type: ignore[list-item]
    shot: Any = {"type": "input_image", "image_url": "https://images.example/a.png", "detail": "auto"}
    result: Any = {"type": "function_call_output", "call_id": "a", "output": [shot]}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.output\[0\] must be a data: URL"):
        client.responses.create(model=NAME, input=[result])
    file: Any = {"type": "image", "source": {"type": "file", "file_id": "a"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [file]}
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]\.content\[0\] must have a source"):
        anthropics.messages.create(model=NAME, max_tokens=1, messages=[{"role": "user", "content": [result]}])
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens cannot be used with images"):
        client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": [image("one")]}],  # type: ignore[list-item]
            extra_body={"truncate_prompt_tokens": 5},
        )  # fmt: skip


def test_requests_beyond_the_context_are_told_both_numbers(client: openai.OpenAI) -> None:
    content: Any = [image("one"), image("two"), image("three"), text("a" * 470)]
    with pytest.raises(openai.BadRequestError, match=r"5[0-9]{2}.*512|512.*5[0-9]{2}"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}])


def test_pixels_that_an_engine_has_are_not_sent_again(folder: Path, reference: Reference) -> None:
    """Its cache has room for the encoding of one image: others are encoded again, from the pixels that it keeps."""
    options = EngineOptions(
        model=str(folder), image_cache_memory=NUM_TOKENS * 48 * 4, enable_prefix_caching=False, **LIMITS
    )
    sizes = list[int]()
    with openai_server(options) as server:
        connection = server.service.client._connection  # type: ignore[attr-defined]
        send = connection.send

        def noted(message: bytes) -> None:
            sizes.append(len(message))
            send(message)

        connection.send = noted
        for name in ("one", "turns", "two", "one", "turns"):
            messages, prompt = CHATS[name]
            answer = server.ask("/v1/chat/completions", messages=messages, max_tokens=NUM_ANSWER, **GREEDY)
            assert answer["choices"][0]["token_ids"] == reference.answer(prompt, *NAMES[name])[1]
        server.wait_until(server.is_idle)
        kept = connection.kept_pixels
        assert (len(kept.images), kept.num_bytes) == (3, 3 * 28 * 28 * 3)
        assert not any(each.pixels for each in kept.images.values())
    large = [size > 28 * 28 * 3 for size in sizes if size > 200]
    assert large == [True, True, True, False, False]


def test_an_engine_that_takes_the_place_of_one_goes_on_with_the_numbers_of_images(
    folder: Path, reference: Reference
) -> None:
    """Calls that are under way have numbers and marks, and are sent to the engine that there is by then."""
    options = EngineOptions(model=str(folder), **LIMITS)

    async def no_pause(_: float) -> None:
        pass

    with openai_server(options, restart_engine=1) as server:
        service, first = server.service, server.service.client
        signals: Any = SimpleNamespace(children=[server.child])
        supervising = server.on_loop(
            lambda: asyncio.ensure_future(
                supervise_engine(service, options, signals, pause=no_pause, spawn=fork_engine)
            )
        )
        for name, serials in (("one", [0]), ("two", [1])):
            messages = [{"role": "user", "content": [image(name), text("and")]}]
            answer = server.ask("/v1/chat/completions", messages=messages, max_tokens=NUM_ANSWER, **GREEDY)
            assert answer["choices"][0]["token_ids"] == reference.answer("USER: <image>\nand ASSISTANT:", name)[1]
            assert list(service.client._connection.kept_pixels.images) == serials  # type: ignore[attr-defined]
            if service.client is first:
                server.child.process.kill()
                server.wait_until(lambda: service.client is not first)
        assert service.client.inputs.images is first.inputs.images
        server.on_loop(supervising.cancel)


def test_one_client_cannot_take_all_memory_of_images(server: OpenAIServer) -> None:
    """The images of a request count until its answer is complete."""
    memory = server.service.admission.images
    num_bytes = 3 * 28 * 28

    whole = memory.max_bytes

    def fill() -> None:
        memory.max_bytes = 2 * num_bytes
        memory.reserve("other", 0, num_bytes, "messages[0]")

    def empty() -> None:
        memory.release("other", num_bytes)
        memory.max_bytes = whole

    server.on_loop(fill)
    try:
        messages = [{"role": "user", "content": [image("one")] * 2}]
        status, error = server.refusal("/v1/chat/completions", messages=messages)
        assert status == 400
        assert "come to 4704 bytes, and may have 2352" in error["message"]
        assert server.ask("/v1/chat/completions", messages=CHATS["one"][0], max_tokens=1)
    finally:
        server.on_loop(empty)


def test_a_request_with_images_is_not_forked_but_explained(client: openai.OpenAI, server: OpenAIServer) -> None:
    ids = []
    for name in ("one", "two"):
        answer = client.chat.completions.create(
            model=NAME, max_tokens=2, messages=[{"role": "user", "content": [text("explain"), image(name)]}]  # type: ignore[list-item]
        )
        ids.append(answer.id)
    server.wait_until(server.is_idle)
    status, error = server.refusal(f"/v1/requests/{ids[0]}/fork", max_tokens=2)
    assert (status, error["message"]) == (400, "a request with images cannot be forked: its images are not kept")
    response = server.http.get(f"/v1/requests/{ids[1]}/explain")
    assert response.status_code == 200, response.text


def test_llm_chat_with_images_of_pillow_and_paths(folder: Path, reference: Reference, tmp_path: Path) -> None:
    file = tmp_path / "two.png"
    picture("two").save(file)
    content = [{"type": "image", "image": picture("one")}, text("and"), {"type": "image", "image": str(file)}]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER, ignore_eos=True)
    with LLM(folder, **LIMITS) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        prompt_ids, expected = reference.answer("USER: <image>\n<image>\nand ASSISTANT:", "one", "two")
        assert (output.prompt_token_ids, output.outputs[0].token_ids) == (prompt_ids, expected)
        assert output.prompt == "USER: <image>\n<image>\nand ASSISTANT:"
        *_, last = llm.stream_chat([{"role": "user", "content": content}], params)
        assert last.outputs[0].token_ids == expected


def test_gemma_3_has_prompts_and_logits_of_transformers(tmp_path: Path) -> None:
    folder = write_gemma3(tmp_path)
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.Gemma3ImageProcessorPil.from_pretrained(folder)
    names = ["one", "two"]
    written = "\n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\n"
    whole = f"<start_of_turn>user\nwhat{written}and{written}<end_of_turn>\n<start_of_turn>model\n"
    ids = torch.tensor([tokenizer(whole, add_special_tokens=False)["input_ids"]])
    pixels = processor([picture(name) for name in names], return_tensors="pt", do_convert_rgb=True)["pixel_values"]
    is_image = (ids == tokenizer.convert_tokens_to_ids("<image_soft_token>")).long()
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=pixels, token_type_ids=is_image).logits[0, -1]
    expected, best = torch.log_softmax(logits.float(), -1).topk(5)
    content = [text("what"), {"type": "image", "image": picture("one")}, text("and"), image("two")]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    with LLM(folder, **LIMITS) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    assert output.prompt_token_ids == ids[0].tolist()
    assert output.outputs[0].logprobs is not None
    found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
    assert set(best.tolist()) <= found.keys()
    assert [found[token] for token in best.tolist()] == pytest.approx(expected.tolist(), abs=1e-4)


def test_mistral_3_has_prompts_and_logits_of_transformers(tmp_path: Path) -> None:
    """Behind each row of an image is a token of text; a typed [IMG] is text, too."""
    folder = write_mistral3(tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.PixtralImageProcessorPil.from_pretrained(folder)
    images = [picture("one").resize((75, 40)), picture("two").resize((300, 31))]
    shapes = [(3, 6), (1, 6)]
    given = processor(images, return_tensors="pt", patch_size=14)
    assert given["image_sizes"].tolist() == [[14 * rows, 14 * columns] for rows, columns in shapes]
    runs = [("[IMG]" * columns + "[IMG_BREAK]") * rows for rows, columns in shapes]
    runs = [run.removesuffix("[IMG_BREAK]") + "[IMG_END]" for run in runs]
    ids = torch.tensor([tokenizer(f"[INST]what{runs[0]}and{runs[1]}[/INST]", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        logits = model(input_ids=ids, **given).logits[0, -1]
    expected, best = torch.log_softmax(logits.float(), -1).topk(5)
    parts = [{"type": "image", "image": each} for each in images]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    with LLM(folder, **LIMITS) as llm:
        content = [text("what"), parts[0], text("and"), parts[1]]
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        (typed,) = llm.chat([{"role": "user", "content": [text("[IMG]"), parts[0]]}], params, use_tqdm=False)
        narrow = [{"type": "image", "image": picture("one").resize((1, 200))}]
        with pytest.raises(InvalidRequestError, match="has 1 x 200 pixels and is too narrow"):
            llm.chat([{"role": "user", "content": narrow}], params, use_tqdm=False)
    assert output.prompt_token_ids == ids[0].tolist()
    assert output.outputs[0].logprobs is not None
    found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
    assert set(best.tolist()) <= found.keys()
    assert [found[token] for token in best.tolist()] == pytest.approx(expected.tolist(), abs=1e-4)
    assert typed.prompt_token_ids.count(tokenizer.convert_tokens_to_ids("[IMG]")) == 18
    assert tokenizer.decode(typed.prompt_token_ids).startswith("[INST][IMG][IMG][IMG]")


def test_llava_onevision_has_prompts_and_logits_of_transformers(tmp_path: Path) -> None:
    """Each of two images in tiles, as it is by itself."""
    folder = write_llava_onevision(tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    images = [picture("one"), picture("two").resize((28, 50))]
    given = processor(images, return_tensors="pt")
    given.pop("batch_num_images")
    with torch.no_grad():
        counts = [len(each) for each in model.get_image_features(**given).pooler_output]
    assert counts == [70, 56]
    written = "".join(f"{'<image>' * count}\n" for count in counts)
    ids = torch.tensor([tokenizer(f"USER: {written}what ASSISTANT:", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        logits = model(input_ids=ids, **given).logits[0, -1]
    expected, best = torch.log_softmax(logits.float(), -1).topk(5)
    content = [*({"type": "image", "image": each} for each in images), text("what")]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    with LLM(folder, **LIMITS) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    assert output.prompt_token_ids == ids[0].tolist()
    assert output.outputs[0].logprobs is not None
    found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
    assert set(best.tolist()) <= found.keys()
    assert [found[token] for token in best.tolist()] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3_5"])
def test_qwen_vl_has_prompts_and_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """Each image has as many tokens as its size gives; an operator may bound them."""
    folder = write_qwen_vl(tmp_path, family)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    images = [picture("one").resize((75, 140)), picture("two").resize((300, 31))]
    given = processor(images, return_tensors="pt")
    counts = [int(grid.prod()) // 4 for grid in given["image_grid_thw"]]
    assert counts == [8, 11]
    pads = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts]
    whole = f"<|im_start|>user\nwhat{pads[0]}and{pads[1]}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer(whole, add_special_tokens=False)["input_ids"]])
    is_image = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=is_image, **given).logits[0, -1]
    expected, best = torch.log_softmax(logits.float(), -1).topk(5)
    parts = [{"type": "image", "image": each} for each in images]
    content = [text("what"), parts[0], text("and"), parts[1]]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    with LLM(folder, **LIMITS) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        for part, message in (
            ({"type": "image", "image": picture("one").resize((5, 1001))}, "has 5 x 1001 pixels and is too narrow"),
            ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "got the type 'video_url'"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                llm.chat([{"role": "user", "content": [part]}], params, use_tqdm=False)
    assert output.prompt_token_ids == ids[0].tolist()
    assert output.outputs[0].logprobs is not None
    found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
    assert set(best.tolist()) <= found.keys()
    assert [found[token] for token in best.tolist()] == pytest.approx(expected.tolist(), abs=1e-4)
    with LLM(folder, mm_processor_kwargs={"max_pixels": 4 * 28 * 28}, **LIMITS) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        assert output.prompt_token_ids.count(int(ids[0, is_image[0].argmax()])) == 4 + 4


def test_a_text_model_refuses_images_as_before(demo_model: Path) -> None:
    with LLM(demo_model, num_kv_blocks=32) as llm, pytest.raises(InvalidRequestError, match="images, audio and files"):
        llm.chat([{"role": "user", "content": [image("one")]}])
