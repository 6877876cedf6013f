"""Answers of a random model to JSON schemas, real and random ones: what ends is valid, what is cut is a beginning."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.decoding.grammars.compiler import GrammarError
from quire.grammar_writing.writer import grammar_of
from support.fuzz_seeds import first_seed
from support.grammars import Vocabulary
from support.json_schemas import random_schema, schemastore
from support.random_model import write_random_model
from support.small_tokenizers import write_byte_tokenizer

MAX_TOKENS = 900
MIN_SHARE = 0.9  # share of answers that end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_random_model(tmp_path_factory.mktemp("random-model"), max_position_embeddings=2048)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(folder / "tokenizer", num_more=42)


def closed(schema: dict[str, Any]) -> StructuredOutputsParams:
    """Objects without properties of the model's own choice: it would invent them without end."""
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)


def usable(schemas: Sequence[dict[str, Any]], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the schemas of which a grammar can be made."""
    found, cache = list[dict[str, Any]](), vocabulary.cache()
    for schema in schemas:
        try:
            cache.get(closed(schema))
        except GrammarError:
            continue
        found.append(schema)
    return found


def answers(folder: Path, schemas: Sequence[dict[str, Any]], **options: Any) -> list[RequestOutput]:  # noqa: ANN401
    """Ask for an answer to each schema at temperature 0 and one at temperature 1, all at once."""
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=index, structured_outputs=closed(schema))
        for temperature in (0.0, 1.0)
        for index, schema in enumerate(schemas)
    ]
    with LLM(folder, tokenizer=folder / "tokenizer", max_model_len=MAX_TOKENS + 10, **options) as llm:
        return llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)


def check(folder: Path, vocabulary: Vocabulary, schemas: Sequence[dict[str, Any]], num_alone: int) -> None:
    """Check answers in a crowded, preempted batch; the first and last ones are those of a request alone, too."""
    crowded = answers(folder, schemas, num_kv_blocks=150, block_size=16, max_num_batched_tokens=64)
    num_ended = 0
    for schema, output in zip([*schemas, *schemas], crowded, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "stop":
            num_ended += 1
            jsonschema.validators.validator_for(schema)(schema).validate(json.loads(answer.text))
        else:
            assert len(answer.token_ids) == MAX_TOKENS
            assert LLMatcher(vocabulary.library, grammar_of(closed(schema))).consume_tokens(answer.token_ids)
    assert num_ended >= MIN_SHARE * len(crowded), f"{num_ended} of {len(crowded)} have ended"
    for index in range(num_alone):
        alone = answers(folder, schemas[index : index + 1], enable_jump_forward=index % 2 == 0)
        if index == 0:  # later ones have other seeds
            assert [each.outputs[0].token_ids for each in alone] == [
                crowded[place].outputs[0].token_ids for place in (0, len(schemas))
            ]
        assert alone[0].outputs[0].token_ids == crowded[index].outputs[0].token_ids


def test_answers_to_real_schemas_are_valid(folder: Path, vocabulary: Vocabulary) -> None:
    check(folder, vocabulary, usable(schemastore(), vocabulary)[::4], num_alone=3)


def test_answers_to_random_schemas_are_valid(folder: Path, vocabulary: Vocabulary) -> None:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(30)]
    found = usable(schemas, vocabulary)
    assert len(found) > 25
    check(folder, vocabulary, found, num_alone=3)


@pytest.mark.fuzz
def test_answers_to_all_schemas_are_valid(folder: Path, vocabulary: Vocabulary) -> None:
    rng = random.Random(first_seed())
    check(folder, vocabulary, usable(schemastore(), vocabulary), num_alone=20)
    check(folder, vocabulary, usable([random_schema(rng) for _ in range(300)], vocabulary), num_alone=20)
