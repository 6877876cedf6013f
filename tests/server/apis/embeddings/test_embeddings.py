"""Embeddings and scores over HTTP, by the openai package and in vLLM's forms, from a server with a tiny model."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from openai import OpenAI
from tokenizers import Tokenizer

from quire.engine.requests.pooling_inputs import AFTER, BEFORE, INSTRUCTION, PAIR
from support.embedders import MAX_LEN, NO, WIDTH, YES, expected_embeddings, write_embedder, write_reranker
from support.server import ServerProcess, running_server

TEXTS = ["the quick brown fox", "jumps over", "the lazy dog: stop stopping the stops", "café"]
MESSAGES = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ word }}{% if add_generation_prompt %}assistant: {% endif %}"
)
LIMITS = (
    "--max-embedding-inputs", "5", "--max-rerank-documents", "5", "--max-pooling-bytes", "2000", "--max-messages", "5",
)  # fmt: skip


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder") / "model", matryoshka_dimensions=[8, 16])


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("reranker") / "model")


@pytest.fixture(scope="module")
def server(embedder: Path) -> Iterator[ServerProcess]:
    names = ("--served-model-name", "tiny", "--chat-template", TEMPLATE)
    with running_server(str(embedder), "--dtype", "float32", *names, *LIMITS) as started:
        yield started


@pytest.fixture(scope="module")
def reranking(reranker: Path) -> Iterator[ServerProcess]:
    with running_server(str(reranker), "--dtype", "float32", *LIMITS) as started:
        yield started


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def encode(folder: Path, text: str, *, special: bool = True) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def expected(folder: Path, texts: list[str]) -> NDArray[np.float32]:
    return np.array(expected_embeddings(folder, [encode(folder, text) for text in texts], "last"))


def test_openai_package_gets_embeddings_of_every_form_of_input(client: OpenAI, embedder: Path) -> None:
    whole = client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64 by itself
    found = np.array([one.embedding for one in whole.data], dtype=np.float32)
    np.testing.assert_allclose(found, expected(embedder, TEXTS), atol=1e-4)
    assert [one.index for one in whole.data] == list(range(len(TEXTS)))
    num_tokens = sum(len(encode(embedder, text)) for text in TEXTS)
    assert (whole.usage.prompt_tokens, whole.usage.total_tokens) == (num_tokens, num_tokens)
    ids = [encode(embedder, text) for text in TEXTS]
    forms: list[Any] = [(TEXTS[0], 1), (ids[0], 1), (ids, 4)]
    for given, number in forms:
        answer = client.embeddings.create(model="tiny", input=given, encoding_format="float")
        assert [one.embedding for one in answer.data] == [list(map(float, row)) for row in found[:number]]


def test_dimensions_and_activation(client: OpenAI, embedder: Path) -> None:
    vector = expected(embedder, TEXTS[:1])[0]
    (cut,) = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8).data
    np.testing.assert_allclose(cut.embedding, vector[:8] / np.linalg.norm(vector[:8]), atol=1e-4)
    raw = client.embeddings.create(model="tiny", input=TEXTS[0], extra_body={"use_activation": False}).data[0]
    assert np.linalg.norm(raw.embedding) > 1.5
    with pytest.raises(openai.BadRequestError, match="dimensions must be one of 8, 16") as refused:
        client.embeddings.create(model="tiny", input="a", dimensions=9)
    assert refused.value.param == "dimensions"


def test_truncation_and_special_tokens(server: ServerProcess, embedder: Path) -> None:
    body: dict[str, Any] = {"input": TEXTS[2], "truncate_prompt_tokens": 6}
    assert server.post("/v1/embeddings", body).json()["usage"]["prompt_tokens"] == 6
    left = server.post("/v1/embeddings", body | {"truncation_side": "left"}).json()
    plain = encode(embedder, TEXTS[2], special=False)
    exact = server.post("/v1/embeddings", {"input": [*plain[-5:], 1]}).json()
    assert left["data"] == exact["data"]
    bare = server.post("/v1/embeddings", {"input": TEXTS[2], "add_special_tokens": False}).json()
    assert bare["usage"]["prompt_tokens"] == len(plain)
    longest = server.post("/v1/embeddings", {"input": "x" * 1900, "truncate_prompt_tokens": -1}).json()
    assert longest["usage"]["prompt_tokens"] == MAX_LEN


def test_embed_route_gives_vectors_in_the_forms_of_cohere(server: ServerProcess) -> None:
    types = ["float", "base64", "binary", "ubinary"]
    answer = server.post("/v2/embed", {"model": "tiny", "texts": TEXTS, "embedding_types": types}).json()
    plain = server.post("/v1/embeddings", {"input": TEXTS}).json()
    vectors = np.array([each["embedding"] for each in plain["data"]], dtype=np.float32)
    found = answer["embeddings"]
    assert list(found) == types
    np.testing.assert_array_equal(np.array(found["float"], dtype=np.float32), vectors)
    decoded = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in found["base64"]]
    np.testing.assert_array_equal(decoded, vectors)
    bits = np.unpackbits(np.array(found["ubinary"], dtype=np.uint8), axis=1)
    np.testing.assert_array_equal(bits, vectors > 0)
    assert found["binary"] == [[byte - 128 for byte in row] for row in found["ubinary"]]
    billed = {"input_tokens": plain["usage"]["prompt_tokens"], "image_tokens": 0}
    assert answer["texts"] == TEXTS
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": billed}
    assert list(server.post("/v2/embed", {"texts": ["a"]}).json()["embeddings"]) == ["float"]


def test_embed_route_truncates_at_the_end_unless_told(server: ServerProcess) -> None:
    def embedding(**fields: object) -> dict[str, Any]:
        answer: dict[str, Any] = server.post("/v2/embed", {"texts": [TEXTS[2]]} | fields).json()
        return answer["embeddings"]

    def expected(**fields: object) -> dict[str, Any]:
        answer = server.post("/v1/embeddings", {"input": TEXTS[2]} | fields).json()
        return {"float": [answer["data"][0]["embedding"]]}

    assert embedding(max_tokens=6) == expected(truncate_prompt_tokens=6)
    assert embedding(max_tokens=6, truncate="START") == expected(truncate_prompt_tokens=6, truncation_side="left")
    assert embedding(truncate="NONE", output_dimension=8) == expected(dimensions=8)
    long = server.post("/v2/embed", {"texts": ["x" * 1900]}).json()
    assert long["meta"]["billed_units"]["input_tokens"] == MAX_LEN


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "texts", "missing"),
        ({"texts": []}, "texts", "at least 1"),
        ({"texts": ["a", 1]}, "texts[1]", "string"),
        ({"texts": ["a"] * 6}, "texts", "max_embedding_inputs"),
        ({"texts": ["a" * 2001]}, "texts", "max_pooling_bytes"),
        ({"texts": ["x" * 1900], "truncate": "NONE"}, "texts", "maximum context length"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate", "NONE, START, END"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "max_tokens", "truncate is NONE"),
        ({"texts": ["a"], "max_tokens": MAX_LEN + 1}, "max_tokens", f"to {MAX_LEN}"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens", "from 1"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types", "float, base64, binary, ubinary"),
        ({"texts": ["a"], "output_dimension": 7}, "output_dimension", "8, 16"),
        ({"texts": ["a"], "input_type": "search_query"}, "input_type", "not supported"),
        ({"texts": ["a"], "images": ["data:"]}, "images", "not supported"),
    ],
)
def test_bad_embed_requests_name_field_and_limit(
    server: ServerProcess, body: dict[str, Any], param: str, message: str
) -> None:
    answer = server.post("/v2/embed", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_conversations_are_embedded_as_the_template_renders_them(server: ServerProcess) -> None:
    text = f"user: {TEXTS[0]}\nassistant: {TEXTS[1]}\n"
    forms: list[tuple[dict[str, Any], str, bool]] = [
        ({}, text, False),
        ({"add_special_tokens": True}, text, True),
        ({"add_generation_prompt": True}, f"{text}assistant: ", False),
        ({"continue_final_message": True}, text.rstrip("\n"), False),
        ({"chat_template_kwargs": {"word": "stop"}}, f"{text}stop", False),
    ]
    for options, rendered, special in forms:
        found = server.post("/v1/embeddings", {"messages": MESSAGES} | options).json()
        exact = server.post("/v1/embeddings", {"input": rendered, "add_special_tokens": special}).json()
        assert (found["data"], found["usage"]["prompt_tokens"]) == (exact["data"], exact["usage"]["prompt_tokens"])
        pooled = server.post("/pooling", {"messages": MESSAGES} | options).json()
        assert pooled["data"][0]["data"] == found["data"][0]["embedding"]
    invoked = server.post("/invocations", {"messages": MESSAGES}).json()
    assert invoked["data"] == server.post("/v1/embeddings", {"messages": MESSAGES}).json()["data"]


def test_conversations_are_begun_or_continued(server: ServerProcess) -> None:
    both = {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}
    answer = server.post("/v1/embeddings", both)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")


def test_pooling_route_gives_the_same_vectors(server: ServerProcess) -> None:
    found = server.post("/v1/embeddings", {"input": TEXTS}).json()
    pooled = server.post("/pooling", {"input": TEXTS, "task": "embed"}).json()
    assert [one["data"] for one in pooled["data"]] == [one["embedding"] for one in found["data"]]
    assert {one["object"] for one in pooled["data"]} == {"pooling"}
    packed = server.post("/pooling", {"input": TEXTS[0], "encoding_format": "base64"}).json()
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["data"]), dtype=np.float32)
    assert vector.tolist() == found["data"][0]["embedding"]
    assert len(vector) == WIDTH


def test_model_generates_beside(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", {"prompt": TEXTS[0], "max_tokens": 3, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "input must be text"),
        ({"input": ""}, None, None),
        ({"input": ["a", [1]]}, "input", "input must be text"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [400]}, "input", "from 0 to 399"),
        ({"input": ["a"] * 6}, "input", "max_embedding_inputs"),
        ({"input": "a" * 2001}, "input", "max_pooling_bytes"),
        ({"input": [3] * 501}, "input", "max_pooling_bytes"),
        ({"input": "x" * 1900}, "input", "maximum context length"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "float or base64"),
        ({"input": "a", "truncate_prompt_tokens": MAX_LEN + 1}, "truncate_prompt_tokens", f"to {MAX_LEN}"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side", "left or right"),
        ({"input": "a", "priority": -1}, "priority", "operator's key"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "1 to 1024"),
        ({"input": "a", "normalize": False}, "normalize", "not supported"),
        ({"input": "a", "messages": [{}]}, "input", "either input or messages"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": ["a"]}, "messages[0]", "an object"),
        ({"messages": [{}]}, "messages", "role"),
        ({"messages": MESSAGES * 3}, "messages", "max_messages"),
        ({"messages": [{"role": "user", "content": "a" * 2001}]}, "messages", "max_pooling_bytes"),
        ({"messages": [{"role": "user", "content": "x" * 1900}]}, "messages", "maximum context length"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "no fields"),
        ({"messages": MESSAGES, "chat_template": "a"}, "chat_template", "not supported"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
        ({}, "input", "either input or messages"),
    ],
)
def test_bad_embedding_requests_name_field_and_limit(
    server: ServerProcess, body: dict[str, Any], param: str | None, message: str | None
) -> None:
    answer = server.post("/v1/embeddings", body)
    if message is None:                                       # its special token is all of it
        assert answer.json()["usage"]["prompt_tokens"] == 1
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param), error
    assert message in error["message"]


def test_scores_of_an_embedder_are_cosines(server: ServerProcess, embedder: Path) -> None:
    vectors = expected(embedder, TEXTS).astype(np.float64)
    one = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    np.testing.assert_allclose([each["score"] for each in one["data"]], vectors[1:] @ vectors[0], atol=1e-4)
    assert one["object"] == "list"
    assert one["data"][0]["object"] == "score"
    pairs = server.post("/v1/score", {"queries": TEXTS[:2], "documents": TEXTS[2:]}).json()
    np.testing.assert_allclose(
        [each["score"] for each in pairs["data"]], (vectors[:2] * vectors[2:]).sum(axis=1), atol=1e-4
    )
    ranking = server.post("/rerank", {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2}).json()
    order = np.argsort(-(vectors[1:] @ vectors[0]))[:2].tolist()
    assert [each["index"] for each in ranking["results"]] == order
    assert ranking["results"][0]["document"]["text"] == TEXTS[1 + order[0]]


@torch.inference_mode()
def expected_scores(folder: Path, pairs: list[tuple[str, str]], instruction: str = INSTRUCTION) -> list[float]:
    """Return the probabilities of yes by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for query, document in pairs:
        middle = PAIR.format(instruction=instruction, query=query, document=document)
        ids = [token for part in (BEFORE, middle, AFTER) for token in encode(folder, part, special=False)]
        logits = model(torch.tensor([ids])).logits[0, -1, [NO, YES]]
        scores.append(float(logits.softmax(dim=0)[1]))
    return scores


def test_reranker_scores_as_its_model_card_does(reranking: ServerProcess, reranker: Path) -> None:
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    wanted = expected_scores(reranker, [(TEXTS[0], text) for text in TEXTS[1:]])
    answer = reranking.post("/v1/rerank", body).json()
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([found[index] for index in range(3)], wanted, atol=1e-4)
    assert sorted(found.values(), reverse=True) == list(found.values())
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 3 * len(encode(reranker, BEFORE))
    told = reranking.post("/v2/rerank", body | {"instruction": "find dogs", "return_documents": False}).json()
    other = {each["index"]: each["relevance_score"] for each in told["results"]}
    wanted = expected_scores(reranker, [(TEXTS[0], text) for text in TEXTS[1:]], "find dogs")
    np.testing.assert_allclose([other[index] for index in range(3)], wanted, atol=1e-4)
    assert all("document" not in each for each in told["results"])
    raw = reranking.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1], "use_activation": False}).json()
    assert 1 / (1 + np.exp(-raw["data"][0]["score"])) == pytest.approx(found[0], abs=1e-6)


def test_pair_is_cut_between_what_frames_it(reranking: ServerProcess, reranker: Path) -> None:
    frame = len(encode(reranker, BEFORE, special=False)) + len(encode(reranker, AFTER, special=False))
    body: dict[str, Any] = {"text_1": TEXTS[0], "text_2": TEXTS[2], "truncate_prompt_tokens": frame + 3}
    assert reranking.post("/score", body).json()["usage"]["prompt_tokens"] == frame + 3
    refused = reranking.post("/score", body | {"truncate_prompt_tokens": frame})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    short = reranking.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[2], "max_tokens_per_doc": 2}).json()
    whole = reranking.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[2]}).json()
    num_cut = len(encode(reranker, TEXTS[2], special=False)) - 2
    assert whole["usage"]["prompt_tokens"] - short["usage"]["prompt_tokens"] == num_cut


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/score", {"text_1": "a"}, "text_1", "a body must have text_1 and text_2"),
        ("/score", {"text_1": "a", "documents": ["b"]}, "text_1", "got documents, text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "one text or as many"),
        ("/score", {"text_1": "a", "text_2": [3]}, "text_2", "a text or a list of texts"),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": MAX_LEN}, "max_tokens_per_doc", "639"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "not empty"),
        ("/rerank", {"query": "a", "documents": ["b"] * 6}, "documents", "max_rerank_documents"),
        ("/rerank", {"query": "a" * 500, "documents": ["b"] * 4}, "documents", "max_pooling_bytes"),
        ("/rerank", {"query": "a", "documents": ["x" * 700]}, "documents", "maximum context length"),
        ("/rerank", {"query": 3, "documents": ["b"]}, "query", "a string"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "from 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": ""}, "instruction", "1 to 4096"),
        ("/v1/embeddings", {"input": "a"}, "model", "gives no embeddings"),
    ],
)
def test_bad_requests_for_scores_name_field_and_limit(
    reranking: ServerProcess, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = reranking.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_model_that_does_not_pool_answers_with_the_reason(demo_model: Path) -> None:
    with running_server(str(demo_model)) as server:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}), ("/pooling", {"input": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]}),
        ):  # fmt: skip
            error = server.post(path, body).json()["error"]
            assert (error["param"], error["code"]) == ("model", "unsupported_parameter")
            assert "--runner pooling" in error["message"]


def test_banner_tells_the_pooling(server: ServerProcess) -> None:
    assert "last of 72 dimensions, normalized" in server.out


def test_tokens_of_a_reranker_may_come_from_outside(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model", "qwen3", None)
    tokens = [Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(token) for token in (NO, YES)]
    overrides = f'{{"classifier_from_token": ["{tokens[0]}", "{tokens[1]}"], "is_original_qwen3_reranker": true}}'
    arguments = ("--runner", "pooling", "--hf-overrides", overrides, "--dtype", "float32")
    with running_server(str(folder), *arguments) as server:
        (score,) = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]}).json()["data"]
    assert score["score"] == pytest.approx(expected_scores(folder, [(TEXTS[0], TEXTS[1])])[0], abs=1e-4)
