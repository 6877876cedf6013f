"""Train the demo model that ships with Quire: a Llama of 5 million parameters that writes Python.

    python tools/train_demo_model.py                         # 45 minutes, then src/quire/model/demo/
    python tools/train_demo_model.py --minutes 5 --out /tmp/demo

`demo_corpus.py` says what it reads. The schedule follows the share of the time budget used, so that the learning rate
reaches zero at the limit whatever the machine's speed; the same seed and interpreter elsewhere give the same tokenizer
and the same batches in the same order until the windows grow, but a faster machine sees more of them. Progress goes
to stdout and, as JSON lines, to `--work`, where the last checkpoint is kept too. The network carries the parameter
names of Hugging Face's LlamaForCausalLM, so the export is a copy of its state in bfloat16.
"""

import argparse
import json
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import demo_corpus as corpus

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, HEAD_DIM, CONTEXT = 256, 32, 2048
ROPE_THETA, NORM_EPS = 10000.0, 1e-5
TOKENS_PER_STEP, WORKERS = 4096, 2
SHORT_WINDOW, LONG_PHASE = 512, 0.85  # windows grow from 512 tokens to CONTEXT after that share of the time
MUON_RATE, ADAMW_RATE = 0.02, 4e-3
HELDOUT_SHARE, MAX_HELDOUT_WINDOWS = 1 / 60, 32


class Sizes(NamedTuple):
    """Sizes of a Llama over the embeddings of the demo model."""

    layers: int
    heads: int
    kv_heads: int
    intermediate: int


DEMO = Sizes(layers=6, heads=8, kv_heads=4, intermediate=672)


class WindowStream:
    """Endless training windows: shuffle the documents, lay them end to end, cut, shuffle the cuts, start again."""

    def __init__(self, documents: list[np.ndarray], seed: int) -> None:
        self.documents, self.rng, self.epoch = documents, np.random.default_rng(seed), 0
        self.windows: list[np.ndarray] = []
        self.length = 0

    def batch(self, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [TOKENS_PER_STEP // length, length]."""
        rows = TOKENS_PER_STEP // length
        if self.length != length or len(self.windows) < rows:
            self._lay_out(length)
        stacked = torch.from_numpy(np.stack([self.windows.pop() for _ in range(rows)]).astype(np.int64))
        return stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()

    def _lay_out(self, length: int) -> None:
        order = self.rng.permutation(len(self.documents))
        stream = np.concatenate([self.documents[i] for i in order])
        starts = np.arange(self.rng.integers(length), len(stream) - length - 1, length)
        self.windows = [stream[s : s + length + 1] for s in self.rng.permutation(starts)]
        self.length, self.epoch = length, self.epoch + 1


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.group = sizes.heads // sizes.kv_heads  # query heads that share keys and values
        self.q_proj = nn.Linear(HIDDEN, sizes.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, sizes.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, sizes.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(sizes.heads * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        by_head = (*x.shape[:2], -1, HEAD_DIM)
        q, k, v = (proj(x).view(by_head).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, length, HEAD_DIM]
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [batch, heads, length, HEAD_DIM], halves paired as Hugging Face does."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(HIDDEN, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=NORM_EPS)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=NORM_EPS)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The decoder of LlamaForCausalLM with tied embeddings; attribute names give Hugging Face's parameter names."""

    def __init__(self, sizes: Sizes = DEMO) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(corpus.VOCAB_SIZE, HIDDEN)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=NORM_EPS)
        frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(CONTEXT), frequencies).repeat(1, 2)  # [CONTEXT, HEAD_DIM]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                ends_a_branch = "o_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * sizes.layers) if ends_a_branch else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per token."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), targets.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, VOCAB_SIZE] of tokens [batch, length]."""
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


class Muon(torch.optim.Optimizer):
    """Momentum, each update brought near the closest orthogonal matrix (Jordan et al. 2024)."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        """Take matrices of one shape, which are orthogonalized as one stack."""
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.02})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        updates = []
        for parameter in group["params"]:
            buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            buffer.lerp_(parameter.grad, 1 - group["momentum"])
            updates.append(parameter.grad.lerp(buffer, group["momentum"]))
        rows, columns = updates[0].shape
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for parameter, update in zip(group["params"], orthogonalize(torch.stack(updates)), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Push all singular values of [count, rows, columns] to about 1; five quintic steps in bfloat16."""
    x = matrices.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


def gradients(model: Llama, inputs: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return loss and gradients of one part of a batch; runs in a worker thread of its own, on one core."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs, targets)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@torch.no_grad()
def evaluate(model: Llama, windows: Tensor) -> float:
    """Return the mean loss over held-out windows [num_windows, length + 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        return sum(float(model(part[:, :-1], part[:, 1:])) for part in windows.split(8)) / len(windows.split(8))


def learning_rate_factor(progress: float) -> float:
    """Rise over the first 2 % of the time, hold, fall linearly to zero over the second half."""
    return min(1.0, progress / 0.02, 2.0 * (1.0 - progress))


def make_optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Return one Muon per shape of the layers' matrices, the largest first, and AdamW for embeddings and norms."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    others = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (by_shape.setdefault(parameter.shape, []) if is_matrix else others).append(parameter)
    muons = [Muon(by_shape[shape], MUON_RATE) for shape in sorted(by_shape, key=math.prod, reverse=True)]
    return [*muons, torch.optim.AdamW(others, ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0)]


def train(model: Llama, stream: WindowStream, heldout: Tensor, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Train until the time budget is used; evaluate, log and export to `args.work` every `args.log_minutes`."""
    optimizers = make_optimizers(model)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start = last_log = time.monotonic()
    step, progress, losses = 0, 0.0, []
    log = (args.work / "log.jsonl").open("w", buffering=1)
    with log, ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        while progress < 1:
            batch = stream.batch(CONTEXT if progress > LONG_PHASE else SHORT_WINDOW)
            parts = zip(*(tensor.chunk(WORKERS) for tensor in batch), strict=True)
            part_losses, grads = zip(*pool.map(lambda part: gradients(model, *part), parts), strict=True)
            for parameter, *shares in zip(model.parameters(), *grads, strict=True):
                parameter.grad = sum(shares[1:], shares[0]) / WORKERS
            for optimizer, rate in zip(optimizers, base_rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(progress)
            list(pool.map(lambda optimizer: optimizer.step(), optimizers))
            step += 1
            losses.append(float(sum(part_losses)) / WORKERS)

            now = time.monotonic()
            progress = min(1.0, (now - start) / (args.minutes * 60))
            if step % 20 == 0:
                print(f"step {step} progress {progress:.3f} loss {np.mean(losses[-20:]):.3f}", flush=True)
            if now - last_log > args.log_minutes * 60 or progress == 1:
                tokens = step * TOKENS_PER_STEP
                record = {"minutes": round((now - start) / 60, 1), "step": step, "tokens": tokens,
                          "epoch": stream.epoch, "tokens_per_s": round(tokens / (now - start)),
                          "train": round(float(np.mean(losses)), 3), "heldout": round(evaluate(model, heldout), 3)}
                print(json.dumps(record), file=log)
                export(model, tokenizer, args.work / "checkpoint")
                losses, last_log = [], now


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face model folder with bfloat16 weights."""
    write_weights(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = make_config(DEMO)
    generation = {"bos_token_id": 0, "eos_token_id": [0, 2]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "chat_template": corpus.CHAT_TEMPLATE,
        "bos_token": corpus.END,
        "eos_token": corpus.END,
        "additional_special_tokens": [corpus.CHAT_START, corpus.CHAT_END],
        "clean_up_tokenization_spaces": False,
    }
    files = {"config": config, "generation_config": generation, "tokenizer_config": tokenizer_config}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(model: Llama, folder: Path) -> None:
    """Write `model.safetensors` in bfloat16, with the names of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"model.{name}": tensor.detach().bfloat16().contiguous() for name, tensor in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def make_config(sizes: Sizes) -> dict[str, object]:
    """Return the content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": corpus.VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }


def held_out_windows(tokenizer: Tokenizer, modules: list[str]) -> Tensor:
    """Return the beginning of the held-out modules, int64 [num_windows, SHORT_WINDOW + 1]."""
    tokens = [token for module in modules for token in tokenizer.encode(module).ids]
    num_windows = min(len(tokens) // (SHORT_WINDOW + 1), MAX_HELDOUT_WINDOWS)
    return torch.tensor(tokens[: num_windows * (SHORT_WINDOW + 1)]).view(num_windows, -1)


def main() -> None:
    """Read the corpus, train the tokenizer and the network, and write the model folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=45.0, help="wall-clock budget of the training loop")
    parser.add_argument("--log-minutes", type=float, default=3.0, help="time between evaluations")
    parser.add_argument("--out", type=Path, default=ROOT / "src/quire/model/demo", help="where the final model goes")
    parser.add_argument("--work", type=Path, default=ROOT / "build/demo", help="log and checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the two workers are the parallelism: on shared cores barriers inside an op cost more

    modules = corpus.read_modules(rng)
    num_heldout = max(1, int(len(modules) * HELDOUT_SHARE))
    heldout, modules = modules[:num_heldout], modules[num_heldout:]
    tokenizer = corpus.train_tokenizer(modules)
    documents = corpus.encode(tokenizer, corpus.make_documents(modules, rng), rng)
    print(f"{len(modules)} modules and {num_heldout} held out", flush=True)
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens", flush=True)

    model = Llama()
    train(model, WindowStream(documents, args.seed), held_out_windows(tokenizer, heldout), tokenizer, args)
    export(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
