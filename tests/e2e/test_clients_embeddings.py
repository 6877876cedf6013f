"""Client libraries that ask for embeddings and rankings, against a real server of a small embedder."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list

import numpy as np
import openai
import pytest
from openai import OpenAI

from support.clients import KEY, LIMIT_S, MODEL
from support.embedders import WIDTH, write_embedder
from support.server import ServerProcess, running_server

TEXTS = ["the quick brown fox", "a lazy dog", "def add(first, second):"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_(computed_)?fields' attribute on:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = write_embedder(tmp_path_factory.mktemp("embedder"))
    with running_server(str(folder), "--served-model-name", MODEL, "--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> Any:  # noqa: ANN401
    """What the openai package reads: float32 [num_texts, WIDTH]."""
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=LIMIT_S, max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS)
    vectors = np.array([each.embedding for each in answer.data], np.float32)
    assert vectors.shape == (len(TEXTS), WIDTH)
    return vectors


def test_langchain(server: ServerProcess, expected: Any) -> None:  # noqa: ANN401
    """Without `check_embedding_ctx_length=False` the package sends token ids of OpenAI's tokenizer."""
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make clients runs this test")
    from langchain_openai import OpenAIEmbeddings

    async def embed() -> tuple[Any, Any, Any]:
        settings: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}
        async with openai.DefaultAsyncHttpxClient() as http:
            model = OpenAIEmbeddings(
                **settings, timeout=LIMIT_S, check_embedding_ctx_length=False, http_async_client=http
            )
            return model.embed_documents(TEXTS), model.embed_query(TEXTS[0]), await model.aembed_documents(TEXTS)

    documents, query, later = asyncio.run(embed())
    np.testing.assert_array_equal(np.array(documents, np.float32), expected)
    np.testing.assert_array_equal(np.array(query, np.float32), expected[0])
    np.testing.assert_array_equal(np.array(later, np.float32), expected)


def test_litellm(server: ServerProcess, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    litellm = pytest.importorskip("litellm", reason="litellm is not installed: make clients runs this test")
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    settings = {"api_base": f"{server.url}/v1", "api_key": KEY, "timeout": LIMIT_S}
    with openai.DefaultHttpxClient() as session:
        monkeypatch.setattr(litellm, "client_session", session)
        for provider in ("openai", "hosted_vllm"):
            answer = litellm.embedding(model=f"{provider}/{MODEL}", input=TEXTS, encoding_format="float", **settings)
            vectors = [each["embedding"] for each in answer.data]
            np.testing.assert_array_equal(np.array(vectors, np.float32), expected)
        common = settings | {"api_base": server.url}
        ranked = litellm.rerank(model=f"hosted_vllm/{MODEL}", query=TEXTS[0], documents=TEXTS[::-1], top_n=2, **common)
        litellm.in_memory_llm_clients_cache.flush_cache()
    assert ranked.results[0]["index"] == len(TEXTS) - 1
    assert len(ranked.results) == 2
    np.testing.assert_allclose(ranked.results[0]["relevance_score"], 1, atol=1e-5)


def test_llama_index(server: ServerProcess, expected: Any) -> None:  # noqa: ANN401
    pytest.importorskip("llama_index.embeddings.openai_like", reason="llama-index is missing: make clients runs this")
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    with openai.DefaultHttpxClient() as http:
        settings: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": KEY, "model_name": MODEL}
        model = OpenAILikeEmbedding(**settings, timeout=LIMIT_S, max_retries=0, http_client=http)
        vectors, query = model.get_text_embedding_batch(TEXTS), model.get_query_embedding(TEXTS[0])
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)
    np.testing.assert_array_equal(np.array(query, np.float32), expected[0])
