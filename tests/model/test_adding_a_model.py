"""The family that docs/adding-a-model.md adds works as it stands there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.kernels.back_end import BackEnd
from quire.model.families import FAMILIES
from quire.model.loader import load_model

PAGE = Path(__file__).parents[2] / "docs/adding-a-model.md"
transformers = pytest.importorskip("transformers")


def test_family_of_the_page_equals_transformers(
    tmp_path: Path, back_end: BackEnd, paged_runner: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PAGE.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(compile(source, str(PAGE), "exec"), names)
    monkeypatch.setitem(FAMILIES, "Starcoder2ForCausalLM", names["starcoder2"])

    config = transformers.Starcoder2Config(
        vocab_size=120, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=9,
    )  # fmt: skip
    torch.manual_seed(3)
    reference = transformers.Starcoder2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(120, (40,)).tolist()
    found = paged_runner(load_model(tmp_path, back_end=back_end)).run("a", tokens, [25]).log_softmax(dim=-1)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
