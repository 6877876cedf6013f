"""Quality of quantized weights or KV caches: KL divergence from the unquantized model, perplexity, on held-out text.

    python bench/quantization_quality.py                                # the demo model
    python bench/quantization_quality.py --model FOLDER --text FILE     # any other
    python bench/quantization_quality.py --outlier 100                  # with an outlier channel in each norm's output
    python bench/quantization_quality.py --kv-cache                     # KV caches of 8 bits

The demo model's text is of the modules of the standard library that its training held out (Python 3.11.7 has the same
ones); that of stories260K the continuations in its expected.json. The unquantized model is run in `--dtype`, with the
same kernels. A row is one scheme: weights, their group, and the group of int8 activations (-: weights are expanded).
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor

from quire.core.config import QUANTIZED
from quire.engine.formats import load_tokenizer
from quire.kernels.choice import choose_back_end
from quire.kernels.torch_arrays import to_tensor
from quire.model.checkpoints.safetensors import SafetensorsCheckpoint
from quire.model.config import read_config, spec_from_config
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import build_decoder
from quire.model.quantization import WHOLE_ROW, Quantization, WeightScheme
from quire.model.resolve import resolve_model
from quire.model.weight_format import RoundedFormat

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]

BLOCK_SIZE = 16
ACTIVATION_GROUPS = (0, 32, 64, 128, 256, 1 << 16)  # 0: weights are expanded; the last is longer than any row
NUM_HELD_OUT = 10  # modules of the standard library, as in tools/train_demo_model.py


class Quality(NamedTuple):
    """Means over tokens; the error is the root mean square of the differences of logits."""

    kl: float
    kl_error: float  # standard error of the mean over windows
    perplexity: float
    error: float

    def __str__(self) -> str:
        """Return the cells of a table's row."""
        return f"{self.kl:.6f} ± {self.kl_error:.6f} | {self.perplexity:.4f} | {self.error:.4f}"


def held_out_tokens(folder: Path, text: Path | None) -> list[int]:
    """Return the tokens of a text that the model was not trained on, or that it wrote itself."""
    if text is None and (folder / "expected.json").exists():
        cases = json.loads((folder / "expected.json").read_text())["cases"]
        return [token for case in cases for token in case["prompt_token_ids"] + case["output_token_ids"]]
    import demo_corpus  # noqa: PLC0415 (a module of tools/)

    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    modules = demo_corpus.read_modules(random.Random(0))[:NUM_HELD_OUT] if text is None else [text.read_text()]
    return tokenizer.encode("".join(modules))


@torch.inference_mode()
def log_probs(model: Decoder, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs of the next token at each place of a window, float32 [length, vocab], and logits."""
    length, num_blocks = len(window), -(-len(window) // BLOCK_SIZE)
    cache = KVCache.allocate(model.kv_geometry, num_blocks, BLOCK_SIZE, model.back_end)
    places = np.arange(length)
    starts, lens = np.array([0, length], np.int32), np.array([length], np.int32)
    tables = np.arange(num_blocks, dtype=np.int32)[None]
    batch = ForwardBatch(window.numpy(), places, places, starts, lens, tables)
    logits = to_tensor(model.logits(model.forward(batch, cache)))
    return logits.log_softmax(dim=-1), logits


def quality(model: Decoder, windows: Tensor, plain: list[tuple[Tensor, Tensor]]) -> Quality:
    """Return the figures of a quantized model beside what the plain one gives."""
    divergences, losses, errors = [], [], []
    for window, (expected, expected_logits) in zip(windows, plain, strict=True):
        found, logits = log_probs(model, window)
        divergences.append((expected.double().exp() * (expected.double() - found.double())).sum(dim=-1).mean())
        losses.append(-found[:-1].gather(1, window[1:, None]).double().mean())
        errors.append((logits - expected_logits).double().square().mean())
    kl, loss = torch.stack(divergences), torch.stack(losses)
    kl_error = kl.std() / len(kl) ** 0.5 if len(kl) > 1 else torch.tensor(float("nan"))
    error = torch.stack(errors).mean().sqrt()
    return Quality(kl.mean().item(), kl_error.item(), loss.mean().exp().item(), error.item())


def schemes(formats: list[str], group_sizes: list[int]) -> Iterator[tuple[WeightScheme, WeightScheme]]:
    """Yield the schemes of layers and head that are compared."""
    for name in formats:
        for group_size in group_sizes:
            for activations in ACTIVATION_GROUPS:
                if activations and group_size != WHOLE_ROW and group_size % activations:
                    continue
                yield WeightScheme(name, group_size, activations), WeightScheme("int8", group_size, activations)


def main(
    model: Annotated[str | None, typer.Option(help="folder; without it, the demo model")] = None,
    text: Annotated[Path | None, typer.Option(help="held-out text")] = None,
    dtype: str = "bfloat16",
    windows: Annotated[int, typer.Option(help="windows of text")] = 16,
    length: Annotated[int, typer.Option(help="tokens of a window")] = 512,
    outlier: Annotated[float, typer.Option(help="factor of an outlier channel; 1: none")] = 1.0,
    formats: str = "int8,int4",
    group_sizes: Annotated[str, typer.Option(help="of weights; -1: a row")] = "32,64,128,256,-1",
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="quantize the KV cache instead of weights")] = False,
) -> None:
    """Measure every scheme."""
    from support.memory_checkpoint import MemoryCheckpoint  # noqa: PLC0415 (a module of tests/)
    from support.outliers import add_outliers  # noqa: PLC0415

    folder = resolve_model(model)
    spec = spec_from_config(read_config(folder))
    tensors = load_file(folder / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(folder) if outlier == 1.0 else MemoryCheckpoint(tensors)
    if outlier != 1.0:
        add_outliers(tensors, outlier)

    def load(quantization: Quantization | None, kv_cache_dtype: str = "auto") -> Decoder:
        return build_decoder(
            spec, checkpoint, dtype=dtype, device="cpu",
            back_end=choose_back_end("cpu", head_dim=spec.head_dim),
            weight_format=None if quantization is None else RoundedFormat(quantization), kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip

    ids = held_out_tokens(folder, text)
    num_windows = min(windows, len(ids) // length)
    tokens = torch.tensor(ids[: num_windows * length], dtype=torch.int64).view(num_windows, length)
    plain = load(None)
    expected = [log_probs(plain, window) for window in tokens]
    found = quality(plain, tokens, expected)
    print(f"{folder.name}, {dtype}, {num_windows} windows of {length} tokens; perplexity {found.perplexity:.4f}")
    if kv_cache:
        print("| KV cache | KL, nats/token | perplexity | rms error of logits |")
        print("| --- | --- | --- | --- |")
        for name in QUANTIZED:
            print(f"| {name} | {quality(load(None, name), tokens, expected)} |", flush=True)
        return
    print("| weights | group | activation group | KL, nats/token | perplexity | rms error of logits |")
    print("| --- | --- | --- | --- | --- | --- |")
    for layers, head in schemes(formats.split(","), [int(size) for size in group_sizes.split(",")]):
        found = quality(load(Quantization("measured", layers, head)), tokens, expected)
        group = "row" if layers.group_size == WHOLE_ROW else layers.group_size
        activations = {0: "-", 1 << 16: "row"}.get(layers.activation_group_size, layers.activation_group_size)
        print(f"| {layers.format} | {group} | {activations} | {found} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
