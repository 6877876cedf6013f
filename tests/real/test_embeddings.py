"""Embeddings of a real encoder, beside transformers."""

from pathlib import Path

import pytest
import torch

from quire import LLM
from support.scripts import SCRIPTS, texts

pytestmark = pytest.mark.real

QUESTIONS = ("How is paper made?", "Where do penguins live?")
PASSAGES = (
    "Pulp is pressed and dried into sheets.",
    "The birds breed on the ice of Antarctica.",
    "Rates rose by a point.",
)
MAX_LENGTH = 256  # tokens, which sentence_bert_config.json says


@torch.inference_mode()
def by_transformers(folder: Path, written: list[str]) -> torch.Tensor:
    """Return unit vectors [len(written), 384], means over tokens, as sentence-transformers makes them."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    vectors = []
    for text in written:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=MAX_LENGTH)
        vectors.append(model(**inputs).last_hidden_state[0].mean(dim=0))
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


def test_vectors_are_transformers(minilm: Path) -> None:
    written = [*QUESTIONS, *PASSAGES, "", *(text[:400] for script in SCRIPTS for text in texts(script, 3))]
    expected = by_transformers(minilm, written)
    with LLM(minilm, dtype="float32", runner="pooling") as llm:
        found = torch.tensor([output.outputs.embedding for output in llm.embed(written, use_tqdm=False)])
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_question_is_nearest_to_its_answer(minilm: Path) -> None:
    with LLM(minilm, runner="pooling") as llm:
        vectors = [torch.tensor(each.outputs.embedding) for each in llm.embed([*QUESTIONS, *PASSAGES], use_tqdm=False)]
    questions, passages = torch.stack(vectors[: len(QUESTIONS)]), torch.stack(vectors[len(QUESTIONS) :])
    assert (questions @ passages.T).argmax(dim=-1).tolist() == [0, 1]
