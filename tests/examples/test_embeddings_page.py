"""The examples of docs/embeddings.md run."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/embeddings.md").read_text(encoding="utf-8")


def test_python_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example.replace("LLM(", "LLM(max_model_len=256, "), "docs/embeddings.md", "exec"), {})
