"""Train the draft model of the demo model: a Llama of two layers over the demo model's embeddings.

    python tools/train_draft_model.py                        # 7 minutes on one core, then tests/data/demo-draft/

It is distilled: the loss is the divergence of its next-token distribution from the demo model's, on the corpus that the
demo model was trained on (`demo_corpus.py`). Embeddings and the first heads and neurons of two layers of the demo model
are where it starts. For tests of draft models, so the wheel does not hold it. Its tokenizer is the demo model's, and
has no copy there.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

import demo_corpus as corpus
from train_demo_model import (
    HEAD_DIM,
    HELDOUT_SHARE,
    ROOT,
    Llama,
    Sizes,
    WindowStream,
    held_out_windows,
    learning_rate_factor,
    make_config,
    make_optimizers,
    write_weights,
)

SIZES = Sizes(layers=2, heads=4, kv_heads=2, intermediate=144)  # 1.47 million parameters: 2.9 MB in bfloat16
TEACHER_LAYERS = (0, 4)  # the layers start from them
WINDOW, RATE = 256, 0.5  # tokens; of the learning rates of training from nothing


def main() -> None:
    """Read the corpus, distill, and write the model folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=7.0, help="wall-clock budget of the training loop")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/data/demo-draft", help="where the model goes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    demo = ROOT / "src/quire/model/demo"
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    modules = corpus.read_modules(rng)
    num_heldout = max(1, int(len(modules) * HELDOUT_SHARE))
    heldout = held_out_windows(tokenizer, modules[:num_heldout])
    documents = corpus.encode(tokenizer, corpus.make_documents(modules[num_heldout:], rng), rng)
    teacher, draft = Llama(), Llama(SIZES)
    state = {name.removeprefix("model."): tensor for name, tensor in load_file(demo / "model.safetensors").items()}
    teacher.load_state_dict(state)
    start_from(draft, state)
    train(teacher, draft, WindowStream(documents, args.seed), args.minutes * 60)
    print(f"held-out tokens with the same likeliest token: {agreement(teacher, draft, heldout):.3f}", flush=True)
    write_weights(draft, args.out)
    (args.out / "config.json").write_text(json.dumps(make_config(SIZES), indent=2) + "\n", encoding="utf-8")


def start_from(draft: Llama, teacher: dict[str, Tensor]) -> None:
    """Copy the demo model's embeddings and last norm, and of some layers the first heads and neurons."""
    state = draft.state_dict()
    for name, tensor in state.items():
        source = name
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            source = f"layers.{TEACHER_LAYERS[int(index)]}.{rest}"
        of_teacher = teacher[source]
        tensor.copy_(of_teacher[tuple(slice(length) for length in tensor.shape)])
    assert state["layers.0.self_attn.q_proj.weight"].shape[0] == SIZES.heads * HEAD_DIM


def train(teacher: Llama, draft: Llama, stream: WindowStream, duration_s: float) -> None:
    """Distill until the time is used."""
    optimizers = make_optimizers(draft)
    base_rates = [RATE * optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        tokens, _ = stream.batch(WINDOW)
        for parameter in draft.parameters():
            parameter.grad = None
        loss = divergence(teacher, draft, tokens)
        loss.backward()
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(progress)
            optimizer.step()
        step += 1
        progress = min(1.0, (time.monotonic() - start) / duration_s)
        if step % 10 == 0:
            print(f"step {step} progress {progress:.3f} divergence {float(loss.detach()):.3f}", flush=True)


def divergence(teacher: Llama, draft: Llama, tokens: Tensor) -> Tensor:
    """Return the mean divergence KL(teacher || draft), in nats per token, of tokens [batch, length]."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            expected = teacher.logits(tokens).flatten(0, 1)
        found = draft.logits(tokens).flatten(0, 1)
    expected = F.log_softmax(expected.float(), dim=-1)
    return F.kl_div(F.log_softmax(found.float(), dim=-1), expected, log_target=True, reduction="batchmean")


@torch.no_grad()
def agreement(teacher: Llama, draft: Llama, windows: Tensor) -> float:
    """Return the share of held-out positions, of windows [num_windows, length], where both choose one token."""
    with torch.autocast("cpu", torch.bfloat16):
        same = [
            (teacher.logits(part).argmax(dim=-1) == draft.logits(part).argmax(dim=-1)).float().mean()
            for part in windows[:, :-1].split(8)
        ]
    return float(torch.stack(same).mean())


if __name__ == "__main__":
    main()
