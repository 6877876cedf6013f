"""The families that docs/adding-a-model.md adds work as they stand there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.back_end import BackEnd
from quire.model.architectures import FAMILIES
from quire.model.decoder import Decoder
from quire.model.loader import load_model

PAGE = Path(__file__).parents[2] / "docs/adding-a-model.md"
transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 120, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def check_against_transformers(
    name: str, options: dict[str, object], folder: Path, back_end: BackEnd, paged_runner: Callable
) -> Decoder:
    """Compare logprobs of a random model, after its family's text has been added; return the decoder."""
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    torch.manual_seed(3)
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(folder)
    tokens = torch.randint(120, (40,)).tolist()
    decoder = load_model(folder, back_end=back_end)
    found = paged_runner(decoder).run("a", tokens, [25]).log_softmax(dim=-1)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    return decoder


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the families of the page."""
    for source in PAGE.read_text().split("```python\n")[1:]:
        names: dict[str, object] = {"__name__": __name__}
        exec(compile(source.split("```")[0], str(PAGE), "exec"), names)
        for family in ("starcoder2", "arcee"):
            if family in names:
                monkeypatch.setitem(FAMILIES, f"{family.capitalize()}ForCausalLM", names[family])


@pytest.mark.usefixtures("added")
def test_family_of_the_page_equals_transformers(tmp_path: Path, back_end: BackEnd, paged_runner: Callable) -> None:
    check_against_transformers("Starcoder2", {"sliding_window": 9}, tmp_path, back_end, paged_runner)


@pytest.mark.usefixtures("added")
def test_family_with_an_op_of_its_own_equals_transformers_and_the_log_names_the_op(
    tmp_path: Path, back_end: BackEnd, paged_runner: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"mlp_bias": True}
    with caplog.at_level("INFO"):
        decoder = check_against_transformers("Arcee", options, tmp_path, back_end, paged_runner)
    names = [f"layers.{i}.square" for i in range(2)]
    if back_end.name == "cpp":
        assert f"2 of them: {', '.join(names)}" in caplog.text
        kinds = [type(op).__name__ for op in decoder._programs[0].ops]
        assert kinds == ["FusedOps", "Square"] * 2 + ["FusedOps"]
    on_cuda = replace(back_end, name="cuda")
    with pytest.raises(ConfigError, match="device cuda does not support Square yet"):
        load_model(tmp_path, back_end=on_cuda)
