"""`quire pack` and `--packed-weights`: the same answers from a packed file, and errors that say what to do."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from quire.engine.loading import packed_place
from quire.engine.options import EngineOptions
from quire.model.resolve import DEMO_MODEL
from support.command_line import Run

GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=3)
PROMPTS = ["def f(x):\n    return", "import os", "naïve 日本"]
PLAIN = ("--prompt", "import os", "--max-tokens", "8", "--temperature", "0", "--num-kv-blocks", "64")


def answers(**settings: Any) -> list[Any]:  # noqa: ANN401 (of any engine)
    with LLM(num_kv_blocks=64, **settings) as llm:
        outputs = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [(each.token_ids, each.logprobs) for each in outputs]


@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}, {"dtype": "float32"}], ids=str)
def test_answers_have_the_bits_of_a_start_without_a_file(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = answers(**settings)
    assert answers(**settings, packed_weights=str(tmp_path)) == plain
    (file,) = tmp_path.iterdir()
    before = file.stat()
    assert answers(**settings, packed_weights=str(tmp_path)) == plain
    assert file.stat().st_ino == before.st_ino


def test_two_engines_and_a_draft_model_beside_a_packed_file(tmp_path: Path) -> None:
    """The target is packed, once for both engines; its draft model is read as ever."""
    settings = {"speculative_config": {"model": str(DEMO_MODEL), "num_speculative_tokens": 2}}
    plain = answers(**settings)
    assert answers(**settings, data_parallel_size=2, packed_weights=str(tmp_path / "packed")) == plain
    assert [each.suffix for each in (tmp_path / "packed").iterdir()] == [".quire"]
    assert answers(**settings, packed_weights=str(tmp_path / "packed")) == plain


def test_packed_file_serves_generate(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "new" / "demo.quire"
    ran = run("pack", "-o", str(file), "-q", "int8")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{file}: ")
    before = file.stat()
    wanted = run("generate", *PLAIN, "-q", "int8")
    assert run("generate", *PLAIN, "-q", "int8", "--packed-weights", str(file)) == wanted
    assert run("pack", "-o", str(file), "-q", "int8") == ran
    assert file.stat().st_ino == before.st_ino


def test_file_that_cannot_be_written_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = run("pack", "-o", str(tmp_path / "file" / "demo.quire"))
    assert ran.code == 1
    assert "File exists" in ran.err


def test_other_back_ends_have_no_packed_weights() -> None:
    options = EngineOptions(packed_weights="any")
    assert packed_place(options, "cpp", must_write=False) is not None
    with pytest.raises(ConfigError, match="packed_weights 'any': the back end triton does not pack weights like that"):
        packed_place(options, "triton", must_write=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_format": "dummy"}, "packed_weights '.*': load_format 'dummy' has no files to pack"),
        ({"tensor_parallel_size": 2}, "packed_weights '.*': tensor_parallel_size 2 packs parts of weights"),
        ({"model_impl": "transformers"}, "packed_weights '.*': not supported for a model through transformers"),
    ],
    ids=["dummy", "ranks", "transformers"],
)
def test_settings_that_have_no_packed_weights_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(packed_weights=str(tmp_path), **settings)
