"""An encoder and a cross-encoder behind HTTP: the routes of embeddings and scores, and their limits."""

from pathlib import Path

import numpy as np

from quire import LLM
from support.encoders import LONGEST, write_encoder
from support.server import running_server

QUERY, TEXTS = "the quick brown fox", ["jumps over", "the lazy dog: stop", "a naïve café"]


def test_embeddings_of_an_encoder_and_scores_by_their_cosines(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "Bert", kind="mean")
    with LLM(folder, dtype="float32") as llm:
        wanted = np.array([output.outputs.embedding for output in llm.embed([QUERY, *TEXTS])])
    with running_server(str(folder), "--dtype", "float32") as server:
        answer = server.post("/v1/embeddings", {"input": [QUERY, *TEXTS]}).json()
        np.testing.assert_allclose([each["embedding"] for each in answer["data"]], wanted, atol=1e-6)
        assert len(server.post("/pooling", {"input": QUERY}).json()["data"]) == 1
        scores = server.post("/score", {"text_1": QUERY, "text_2": TEXTS}).json()["data"]
        np.testing.assert_allclose([each["score"] for each in scores], wanted[1:] @ wanted[0], atol=1e-6)
        refused = server.post("/v1/embeddings", {"input": [5] * (LONGEST + 1)})
        assert refused.status_code == 400
        assert f"maximum context length is {LONGEST} tokens" in refused.json()["error"]["message"]
        cut = {"input": [5] * (LONGEST + 1), "truncate_prompt_tokens": -1}
        assert server.post("/v1/embeddings", cut).json()["usage"]["prompt_tokens"] == LONGEST
        assert server.post("/v1/completions", {"prompt": QUERY}).status_code == 400
        metrics = server.get("/metrics").text
        assert "vllm:kv_cache_usage_perc" in metrics
        assert server.get("/health").status_code == 200


def test_rankings_of_a_cross_encoder(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "XLMRoberta", end="ForSequenceClassification", num_labels=1)
    with LLM(folder, dtype="float32") as llm:
        wanted = [output.outputs.score for output in llm.score(QUERY, TEXTS)]
    with running_server(str(folder), "--dtype", "float32") as server:
        results = server.post("/rerank", {"query": QUERY, "documents": TEXTS}).json()["results"]
        assert [each["index"] for each in results] == np.argsort(wanted)[::-1].tolist()
        found = server.post("/v1/score", {"queries": QUERY, "documents": TEXTS}).json()["data"]
        np.testing.assert_allclose([each["score"] for each in found], wanted, atol=1e-6)
        refused = server.post("/v1/embeddings", {"input": QUERY}).json()
        assert "it gives no embeddings" in refused["error"]["message"]
