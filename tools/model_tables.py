"""Tables of the model families in docs/models.md, made from the families and their tests.

    python tools/model_tables.py    # writes them into the page

A table is between `<!-- models: NAME -->` and `<!-- end of models -->`. Each family is run on a small config, and
the keys that it reads and refuses are recorded.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import getdoc
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from page_tables import Page, table
from quire.kernels.support import SUPPORT
from quire.model.config_reader import ConfigReader
from quire.model.families import FAMILIES

TESTS = Path(__file__).parents[1] / "tests/model/test_families.py"
TEXT_CONFIG = {
    "vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "hidden_size": 64, "ffn_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "max_position_embeddings": 32,
    "num_key_value_heads": 2, "rotary_dim": 16,
}  # fmt: skip
CONFIG: dict[str, object] = {**TEXT_CONFIG, "text_config": TEXT_CONFIG}  # of a model with vision
SIZES = {*CONFIG, "head_dim", "n_inner", "architectures", "original_max_position_embeddings"}


class Recorded:
    """Keys of a config that a family has read, and those that it refuses, with the reason."""

    def __init__(self) -> None:
        self.read: dict[str, None] = {}
        self.refused: dict[str, str] = {}


@contextmanager
def recording() -> Iterator[Recorded]:
    """Record what all readers are asked for."""
    found, values = Recorded(), ConfigReader._get
    has, raw = ConfigReader.has, ConfigReader.raw

    def note(method: Any) -> Any:  # noqa: ANN401 (a method of a reader)
        def noted(self: ConfigReader, key: str, *more: object) -> object:
            if not key.isdigit() and key != "keys":
                found.read[key] = None
            return method(self, key, *more)

        return noted

    def reject(self: ConfigReader, key: str, *harmless: object, why: str) -> None:
        found.refused[key] = why

    changed = {"_get": note(values), "has": note(has), "raw": note(raw), "reject": reject}
    with patch.multiple(ConfigReader, **changed):
        yield found


class Cases:
    """Names of the cases in the tests, by architecture."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "GPT2": "GPT2LMHeadModel",
        "Gemma3Text": "Gemma3ForCausalLM",
        "Gemma3": "Gemma3ForConditionalGeneration",
        "Mistral3": "Mistral3ForConditionalGeneration",
    }

    def __init__(self) -> None:
        found = (node for node in ast.parse(TESTS.read_text(encoding="utf-8")).body if isinstance(node, ast.AnnAssign))
        cases = next(node.value for node in found if isinstance(node.target, ast.Name) and node.target.id == "CASES")
        assert isinstance(cases, ast.Dict)
        self.by_architecture: dict[str, list[str]] = {}
        for key, value in zip(cases.keys, cases.values, strict=True):
            assert isinstance(key, ast.Constant)
            assert isinstance(value, ast.Tuple)
            family = value.elts[0]
            assert isinstance(family, ast.Constant)
            name = self.NAMES.get(str(family.value), f"{family.value}ForCausalLM")
            self.by_architecture.setdefault(name, []).append(str(key.value))


def code(names: Collection[str]) -> str:
    """Return names as code in a cell."""
    return ", ".join(f"`{name}`" for name in names)


def families() -> str:
    """Return the table of the families."""
    cases, rows = Cases().by_architecture, []
    for architecture, family in FAMILIES.items():
        with recording() as found:
            family(ConfigReader(CONFIG, "config.json"))
        options = [key for key in found.read if key not in SIZES and key not in found.refused]
        refused = "; ".join(f"`{key}`: {why}" for key, why in found.refused.items())
        what = re.split(r"(?<!et al)\. ", getdoc(family) or "")[0].removeprefix("Return the spec of ").rstrip(".")
        tested = [name.partition(", ")[2] or "plain" for name in cases[architecture]]
        rows.append((f"`{architecture}`", what, code(sorted(options)), refused, "; ".join(tested)))
    return table(("architecture", "models", "options that are read", "options that are refused", "cases tested"), *rows)


def parts() -> str:
    """Return the table of ops and features by device."""
    rows = ((name, "yes", "yes" if "cuda" in ends else "refused") for name, ends in SUPPORT.items())
    return table(("op or feature", "CPU", "CUDA"), *rows)


TABLES = {"families": families, "parts": parts}


PAGE = Page("models.md", "models", TABLES)

if __name__ == "__main__":
    PAGE.write()
