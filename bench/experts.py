"""Mixtures of experts beside the floors of memory and arithmetic: one layer, and a model of Qwen3-30B-A3B's shape.

    python bench/experts.py layer [--threads 2] [--formats bfloat16,int8,int4] [--rows 1,64]
    python bench/experts.py model [--layers 48] [--steps 20]    # int4: 17 GB with 48 layers

The bandwidth floor is a plain read of the very weights that are used: of the router, and of the experts that the rows
of a step choose. The floor of arithmetic is the products of those rows at the rate of one dense layer of the experts'
shape with 512 rows. All are measured in turns; medians, and in brackets the quartiles: of wall time, or with one thread
of the time that it ran. The model's elements are random bytes, the same for all experts, packed expert by expert; it
needs no files.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from bench_attention import clock_of_threads, in_turns, random_values, read, spread
from quantized_linear import FORMATS, random_weight
from quire.core.arrays import BFLOAT16, FLOAT32, Array
from quire.extension.isas import set_threads_of_kernels
from quire.kernels.choice import choose_back_end
from quire.kernels.cpp.cpp_experts import CppExperts
from quire.kernels.cpp.cpp_linear import CppLinear
from quire.kernels.cpp.cpp_packing import PackedMemory
from quire.kernels.layers import Expert, Routing
from quire.kernels.linear_weight import LinearWeight, Table
from quire.model.checkpoints.tensor_reader import TensorReader
from quire.model.config import expert_reads, spec_from_config
from quire.model.dummy_weights import DummyCheckpoint
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import build_decoder
from quire.model.weight_format import ModuleRows

WIDTH, INNER, NUM_EXPERTS, NUM_CHOSEN, VOCAB_SIZE = 2048, 768, 128, 8, 151_936
MANY_ROWS = 512  # a dense layer's; its rate is the floor of arithmetic
NUM_INPUTS = 8   # taken in turns, as each chooses other experts
NAMES = {"bfloat16": "bfloat16", "int8": "int8 in groups of 128", "int4": "int4 in groups of 128"}
A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 4096,
    "num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
}  # fmt: skip
CONTEXT, BLOCK_SIZE = 64, 16
PROMPT_REPEATS = 5
app = typer.Typer(add_completion=False)


class Mixture:
    """One layer's experts in a format, their router, and inputs that choose different ones."""

    def __init__(self, form: str, num_experts: int) -> None:
        memory, kind = PackedMemory(), FORMATS[NAMES[form]]
        up, down = random_weight(2 * INNER, WIDTH, kind), random_weight(WIDTH, INNER, kind)
        self.experts = [
            Expert(
                CppLinear(up, activation="silu_and_mul", memory=memory),
                CppLinear(down, dtype=FLOAT32, memory=memory),
            )
            for _ in range(num_experts)
        ]
        scores = LinearWeight.dense(random_values((num_experts, WIDTH), BFLOAT16))
        self.router = CppLinear(scores, dtype=FLOAT32, memory=memory)
        self.routing = Routing(NUM_CHOSEN, is_normalized=True)
        self.layer = CppExperts(self.router, self.experts, self.routing)

    def used(self, x: Array) -> list[CppLinear]:
        """Return the layers that rows use."""
        chosen = np.unique(np.argsort(-self.router(x))[:, :NUM_CHOSEN])
        return [self.router, *(layer for number in chosen for layer in self.experts[number])]  # type: ignore[list-item]


def compute(call: Callable[[Any], object], inputs: Sequence[object]) -> None:
    """Call with each of the inputs."""
    for each in inputs:
        call(each)


@app.command("layer")
def bench_layer(
    threads: Annotated[int, typer.Option(help="threads of the kernels")] = 2,
    formats: Annotated[str, typer.Option(help="bfloat16, int8, int4, with commas")] = "bfloat16,int8,int4",
    rows: Annotated[str, typer.Option(help="numbers of rows, with commas")] = "1,64",
    experts: Annotated[int, typer.Option(help="experts of the layer")] = NUM_EXPERTS,
    repeats: Annotated[int, typer.Option(help="timed rounds")] = 15,
) -> None:
    """One layer of 2048 with experts of 768, 8 for each row."""
    set_threads_of_kernels(threads)
    choose_back_end("cpu", "cpp")
    for form in formats.split(","):
        mixture = Mixture(form, experts)
        many, dense = random_values((MANY_ROWS, WIDTH), BFLOAT16), mixture.experts[0].layer_in
        for count in map(int, rows.split(",")):
            inputs = np.split(random_values((NUM_INPUTS * count, WIDTH), BFLOAT16), NUM_INPUTS)
            used = [mixture.used(x) for x in inputs]
            memory = [[layer._weight.packed for layer in layers] for layers in used]
            calls = [
                partial(compute, mixture.layer, inputs), partial(compute, read, memory), partial(compute, dense, [many])
            ]  # fmt: skip
            ours, reads, dense_s = in_turns(calls, repeats, clock_of_threads())
            rate = MANY_ROWS * 2 * INNER * WIDTH / statistics.median(dense_s)
            products_s = count * NUM_CHOSEN * 3 * INNER * WIDTH / rate
            ms, read_ms = ([s / NUM_INPUTS * 1e3 for s in each] for each in (ours, reads))
            floor = max(statistics.median(read_ms), products_s * 1e3)
            num_used = sum(len(layers) // 2 for layers in used) / NUM_INPUTS
            num_bytes = sum(layer.num_bytes for layers in used for layer in layers) / NUM_INPUTS
            print(
                f"{form:9} {count:4} rows, {num_used:5.1f} of {experts} experts: ms {spread(ms)}, "
                f"plain read {spread(read_ms)}, arithmetic {products_s * 1e3:.3f}, by the floor "
                f"{statistics.median(ms) / floor:.2f}, GB/s {num_bytes / statistics.median(ms) * 1e-6:.1f}", flush=True,
            )  # fmt: skip


class RandomInt4:
    """A `WeightFormat` of random int4 in groups of 128, the head of int8; one weight for each shape."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, str], LinearWeight] = {}

    def read(
        self, tensors: TensorReader, modules: Sequence[ModuleRows], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return a weight of the modules' rows."""
        tensors.names_read.update(f"{module.module}.weight" for module in modules)
        return self._of(sum(module.num_rows for module in modules), width, "int4")

    def read_table(self, tensors: TensorReader, module: ModuleRows, width: int) -> None:
        """Return None: the table is read as floats."""

    def read_head(
        self, tensors: TensorReader, module: ModuleRows, width: int, embedding: Table | None
    ) -> LinearWeight:
        """Return the head."""
        tensors.names_read.add(f"{module.module}.weight")
        return self._of(module.num_rows, width, "int8")

    def _of(self, num_rows: int, width: int, form: str) -> LinearWeight:
        key = num_rows, width, form
        if key not in self._made:
            self._made[key] = random_weight(num_rows, width, FORMATS[NAMES[form]])
        return self._made[key]


@app.command("model")
def bench_model(
    threads: Annotated[int, typer.Option(help="threads of the kernels")] = 2,
    layers: Annotated[int, typer.Option(help="layers; Qwen3-30B-A3B has 48")] = 48,
    steps: Annotated[int, typer.Option(help="timed tokens")] = 20,
    prompt: Annotated[int, typer.Option(help="tokens of a prompt, computed in one step; 0: none")] = 512,
) -> None:
    """Decode one sequence with a model of Qwen3-30B-A3B's shape, its linear layers in int4, and compute a prompt."""
    set_threads_of_kernels(threads)
    begin = time.perf_counter()
    spec = spec_from_config(A3B | {"num_hidden_layers": layers})
    back_end = choose_back_end("cpu", "cpp", head_dim=spec.head_dim)
    decoder = build_decoder(
        spec, DummyCheckpoint(spec), dtype="bfloat16", device="cpu", back_end=back_end,
        weight_format=RandomInt4(),
    )  # fmt: skip
    cache = KVCache.allocate(decoder.kv_geometry, -(-max(CONTEXT, prompt) // BLOCK_SIZE), BLOCK_SIZE, back_end)
    reads = expert_reads(spec)
    assert reads is not None
    embedding_bytes = 2 * spec.vocab_size * spec.hidden_size
    token_bytes = (decoder.weight_bytes - embedding_bytes) * reads.num_weights / (
        decoder.num_parameters - spec.vocab_size * spec.hidden_size
    )
    made_s = time.perf_counter() - begin
    sizes = f"{decoder.num_parameters / 1e9:.1f} G parameters, {decoder.weight_bytes / 1e9:.1f} GB"
    print(f"{sizes}, made in {made_s:.0f} s; a token reads {token_bytes / 1e9:.2f} GB", flush=True)
    words = np.ones(int(token_bytes) // 8, np.int64)
    calls = [lambda: step(decoder, cache, CONTEXT - 1, 1), lambda: read([words])]
    token_s, read_s = in_turns(calls, steps, clock_of_threads())
    median = statistics.median(token_s)
    print(f"{1 / median:.2f} tokens/s, ms {spread([s * 1e3 for s in token_s])}; plain read of as many bytes ms "
          f"{spread([s * 1e3 for s in read_s])}, by it {median / statistics.median(read_s):.2f}, "
          f"GB/s {token_bytes / median * 1e-9:.1f}", flush=True)  # fmt: skip
    if prompt:
        (prompt_s,) = in_turns([lambda: step(decoder, cache, 0, prompt)], PROMPT_REPEATS, clock_of_threads())
        print(f"prompt of {prompt}: {prompt / statistics.median(prompt_s):.0f} tokens/s, s {spread(prompt_s)}")


def step(decoder: object, cache: KVCache, first: int, num_tokens: int) -> Array:
    """Compute the tokens of a sequence from position `first` on: random ones, so that each step uses other experts."""
    context = first + num_tokens
    positions, tokens = np.arange(first, context), np.random.default_rng().integers(VOCAB_SIZE, size=num_tokens)
    batch = ForwardBatch(
        tokens, positions, positions, np.array([0, num_tokens], np.int32), np.array([context], np.int32),
        np.arange(-(-context // BLOCK_SIZE), dtype=np.int32)[None],
    )  # fmt: skip
    return decoder.logits(decoder.forward(batch, cache)[-1:])  # type: ignore[attr-defined]


if __name__ == "__main__":
    app()
