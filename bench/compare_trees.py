"""Two checkouts of Quire, OLD and NEW: the same tokens and logprobs to the bit, and the ratio of their speeds.

    python bench/compare_trees.py ../old .                      # both parts
    python bench/compare_trees.py ../old . --part bits --requests 50
    python bench/compare_trees.py ../old . --part speed --rounds 9

Each checkout runs with the interpreter of its own `.venv`, in processes of its own, by names that are public in both.
`bits` sends random requests (sampling, penalties, branches, beams, logprobs, common prefixes) through a cache so small
that requests are preempted, for each instruction set of the CPU and each dtype: the demo model and, where it is there,
stories260K. Every token id, text, logprob (as hexadecimal), rank and reason is compared.
`speed` measures both checkouts in turn, the order alternating by round, and prints medians and ratios (above 1: NEW is
faster): of the medians, of the best times, and of the medians of CPU time, which other work on the machine disturbs
least (with OMP_NUM_THREADS=1: threads that wait for each other count). Exit status 1: some answer differs.
"""

import importlib
import importlib.util
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")
STORIES = Path("../shared/data/models/stories260K")  # beside the checkout
SMALL = {"num_kv_blocks": 88, "max_num_seqs": 24, "max_num_batched_tokens": 96}
LONGEST = 320                                        # tokens of a request's prompt and output
CONTROL_PLANE = (256, 128, 16)  # sequences, tokens of a prompt, tokens of a block
CONTROL_PLANE_STEPS = 200
RANDOM_MODEL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 8192}
Json = dict[str, Any]


# The worker: in the interpreter of one checkout, one JSON object per line in and out.


class Worker:
    """One checkout's engine, asked for answers or for times."""

    def __init__(self) -> None:
        self._quire = importlib.import_module("quire")
        self._llm: Any = None

    def load(self, model: str | None, settings: Json) -> Json:
        """Load a model; say so if this machine or model refuses the settings."""
        errors = importlib.import_module("quire.core.errors")
        if self._llm is not None:
            self._llm.close()
        try:
            self._llm = self._quire.LLM(model, **settings)
        except errors.ConfigError as error:
            return {"refused": str(error)}
        return {"vocab_size": self._llm.vocab_size}

    def answer(self, requests: list[Json]) -> list[Json]:
        """Return the answers to all requests, which run together; beam searches after the others."""
        quire, beams = self._quire, [request for request in requests if "beam" in request]
        sampled = [request for request in requests if "beam" not in request]
        params = [self._params(**request["params"]) for request in sampled]
        outputs = self._llm.generate([request["prompt"] for request in sampled], params, use_tqdm=False)
        for request in beams:
            beam = quire.BeamSearchParams(**request["beam"])
            outputs += self._llm.beam_search([request["prompt"]], beam, use_tqdm=False)
        return [_plain(output) for output in outputs]

    def _params(self, logit_bias: dict[str, float] | None = None, **params: object) -> object:
        bias = logit_bias and {int(token): value for token, value in logit_bias.items()}
        return self._quire.SamplingParams(logit_bias=bias, **params)

    def decode(self, num_seqs: int, num_tokens: int) -> list[float]:
        """Return the wall and CPU seconds per step of `num_seqs` sequences that decode together."""
        params = self._quire.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        prompts = [[1 + index % 100] * 16 for index in range(num_seqs)]
        begun = _clocks()
        self._llm.generate(prompts, params, use_tqdm=False)
        return [seconds / num_tokens for seconds in _since(begun)]

    def prefill(self, num_tokens: int, seed: int) -> list[float]:
        """Return the seconds to the first token behind a prompt that is in no cache."""
        prompt = random.Random(seed).choices(range(1, self._llm.vocab_size), k=num_tokens)
        params = self._quire.SamplingParams(temperature=0.0, max_tokens=1)
        begun = _clocks()
        self._llm.generate([prompt], params, use_tqdm=False)
        return _since(begun)

    def control_plane(self) -> list[float]:
        """Return the seconds per step of scheduler, batch preparation and token handling."""
        steps, (num_seqs, *sizes) = CONTROL_PLANE_STEPS, CONTROL_PLANE
        is_apart = importlib.util.find_spec("quire_lab") is not None  # not in older checkouts
        name = "quire_lab.bench.control_plane" if is_apart else "quire.cli.bench.control_plane"
        engine = importlib.import_module(name).decoding_engine(num_seqs, steps, *sizes)
        begun = _clocks()
        for _ in range(steps):
            engine.step()
        return [seconds / steps for seconds in _since(begun)]


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(begun: tuple[float, float]) -> list[float]:
    return [now - then for now, then in zip(_clocks(), begun, strict=True)]


def _plain(output: Any) -> Json:  # noqa: ANN401 (a RequestOutput)
    """Return everything of an answer that must not differ, and how often its request was preempted."""

    def tables(positions: list[Any] | None) -> list[Any] | None:
        return positions and [
            row and [[token, one.logprob.hex(), one.rank] for token, one in row.items()] for row in positions
        ]

    return {
        "num_preemptions": output.metrics.num_preemptions,
        "prompt_logprobs": tables(output.prompt_logprobs),
        "outputs": [
            {
                "token_ids": one.token_ids,
                "text": one.text,
                "cumulative_logprob": one.cumulative_logprob and one.cumulative_logprob.hex(),
                "logprobs": tables(one.logprobs),
                "reasons": [one.finish_reason, one.stop_reason],
            }
            for one in output.outputs
        ],
    }


def work() -> None:
    """Serve commands until standard input ends."""
    logging.disable(logging.WARNING)
    worker, out = Worker(), sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(**arguments)), file=out, flush=True)


# The driver: any interpreter with typer.


class Tree:
    """One checkout, with its worker."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]") -> None:
        self.folder = folder
        self._process = process

    def ask(self, name: str, **arguments: Any) -> Any:  # noqa: ANN401 (JSON)
        """Return what the worker's method `name` returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the worker of {self.folder} has ended"
        return json.loads(line)


@contextmanager
def running(folder: Path) -> Iterator[Tree]:
    """Start the worker of a checkout, and end it."""
    command = [str(folder.resolve() / ".venv/bin/python"), str(Path(__file__).resolve()), "--work"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Tree(folder, process)


def random_requests(count: int, vocab_size: int, seed: int) -> list[Json]:
    """Return requests that reach most of what a sampler and a scheduler do; a third shares a prefix with others."""
    rng = random.Random(seed)
    prefixes = [rng.choices(range(1, vocab_size), k=rng.choice((20, 48, 100))) for _ in range(4)]
    return [_random_request(rng, prefixes, vocab_size) for _ in range(count)]


def _random_request(rng: random.Random, prefixes: list[list[int]], vocab_size: int) -> Json:
    prompt = rng.choices(range(1, vocab_size), k=rng.choice((1, 3, 15, 16, 17, 40, 90)))
    if rng.random() < 1 / 3:
        prompt = rng.choice(prefixes) + prompt
    max_tokens = min(rng.choice((1, 4, 16, 64, 240)), LONGEST - len(prompt))
    if rng.random() < 0.05:
        return {"prompt": prompt, "beam": {"beam_width": rng.choice((2, 4)), "max_tokens": max_tokens}}
    params: Json = {"max_tokens": max_tokens, "temperature": rng.choice((0.0, 0.0, 0.7, 1.0, 1.4))}
    params["ignore_eos"] = rng.random() < 0.5
    choices: Json = {
        "seed": rng.randrange(2**40),
        "n": rng.choice((2, 3)),
        "top_p": rng.choice((0.3, 0.9)),
        "top_k": rng.choice((1, 5, 40)),
        "min_p": 0.05,
        "presence_penalty": 0.8,
        "frequency_penalty": -0.4,
        "repetition_penalty": 1.2,
        "logprobs": rng.choice((0, 1, 5)),
        "prompt_logprobs": rng.choice((0, 3)),
        "min_tokens": min(3, max_tokens),
        "stop_token_ids": rng.sample(range(vocab_size), 20),
        "logit_bias": {str(token): rng.uniform(-5, 5) for token in rng.sample(range(vocab_size), 8)},
        "allowed_token_ids": rng.sample(range(vocab_size), vocab_size // 4),
    }
    params |= {name: value for name, value in choices.items() if rng.random() < 0.25}
    return {"prompt": prompt, "params": params}


def compare_bits(old: Tree, new: Tree, num_requests: int, isas: list[str], seed: int) -> int:
    """Print a line for each model, instruction set and dtype; return the number of answers that differ."""
    num_different = 0
    models = [None, *([str(STORIES.resolve())] if STORIES.is_dir() else [])]
    for model, isa, dtype in product(models, isas, ("float32", "bfloat16")):
        settings = SMALL | {"cpu_isa": isa, "dtype": dtype, "max_model_len": LONGEST}
        loaded = [tree.ask("load", model=model, settings=settings) for tree in (old, new)]
        name = f"{Path(model).name if model else 'demo':10} {isa:12} {dtype:8}"
        if "refused" in loaded[0] or "refused" in loaded[1]:
            print(f"{name}  not on this machine: {loaded[1].get('refused', loaded[0].get('refused'))}")
            num_different += ("refused" in loaded[0]) != ("refused" in loaded[1])
            continue
        requests = random_requests(num_requests, loaded[0]["vocab_size"], seed)
        theirs, ours = (tree.ask("answer", requests=requests) for tree in (old, new))
        num_preemptions = sum(one.pop("num_preemptions") for answers in (theirs, ours) for one in answers) / 2
        different = [number for number, (one, two) in enumerate(zip(theirs, ours, strict=True)) if one != two]
        tokens = sum(len(one["token_ids"]) for answer in theirs for one in answer["outputs"])
        print(
            f"{name}  {len(theirs)} answers, {tokens} tokens, {num_preemptions:.0f} preemptions, "
            f"{len(different)} differ {different[:8] or ''}"
        )
        num_different += len(different)
    return num_different


def compare_speed(old: Tree, new: Tree, rounds: int, model: Path | None) -> None:
    """Print the medians of both checkouts in turn, their ratio, and the range of the ratios by round."""
    trees = (old, new)
    with tempfile.TemporaryDirectory() as folder:
        models = [("demo", None), ("random", write_random_model(Path(folder)))]
        models = models if model is None else [(model.name, model)]
        for name, path in models:
            for tree in trees:
                tree.ask("load", model=path and str(path), settings={"num_kv_blocks": 1024, "max_num_seqs": 64})
            cases: list[tuple[str, str, Json]] = [
                ("decode of 1", "decode", {"num_seqs": 1, "num_tokens": 128}),
                ("decode of 64", "decode", {"num_seqs": 64, "num_tokens": 16}),
                ("prompt of 2,047", "prefill", {"num_tokens": 2047}),
            ]
            for title, method, arguments in cases:
                _in_turn(f"{name}, {title}", trees, method, arguments, rounds)
        _in_turn("control plane, 256", trees, "control_plane", {}, rounds)


def _in_turn(title: str, trees: tuple[Tree, Tree], method: str, arguments: Json, rounds: int) -> None:
    pairs: list[tuple[list[float], list[float]]] = []
    for number in range(rounds + 1):
        given = arguments | ({"seed": number} if method == "prefill" else {})
        order = trees if number % 2 else trees[::-1]
        seconds = {tree.folder: tree.ask(method, **given) for tree in order}
        if number:  # the first warms up
            pairs.append((seconds[trees[0].folder], seconds[trees[1].folder]))
    old_s, new_s = (statistics.median(wall for wall, _ in column) for column in zip(*pairs, strict=True))
    old_cpu_s, new_cpu_s = (statistics.median(cpu for _, cpu in column) for column in zip(*pairs, strict=True))
    best = min(old[0] for old, _ in pairs) / min(new[0] for _, new in pairs)
    ratios = [old[1] / new[1] for old, new in pairs]
    print(
        f"{title:24} old {old_s * 1e3:9.3f} ms  new {new_s * 1e3:9.3f} ms  ratio {old_s / new_s:.3f}, best {best:.3f}, "
        f"CPU {old_cpu_s / new_cpu_s:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def write_random_model(folder: Path) -> Path:
    """Write a Llama of about 21 million random weights; return its folder."""
    import torch  # noqa: PLC0415 (`bits` does without)
    from safetensors.torch import save_file  # noqa: PLC0415

    width, inner, vocab = (RANDOM_MODEL[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embed_tokens": (vocab, width), "lm_head": (vocab, width), "model.norm": (width,)}
    for layer in range(RANDOM_MODEL["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj": (width, width) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": (width, inner)}
        shapes |= {f"{at}{name}_layernorm": (width,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": (torch.randn(shape, generator=generator) / width**0.5).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    config = RANDOM_MODEL | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 8,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main(
    old: Annotated[Path, typer.Argument(help="a checkout with a .venv")],
    new: Annotated[Path, typer.Argument(help="another one")],
    part: Annotated[str, typer.Option(help="bits, speed or both")] = "both",
    requests: Annotated[int, typer.Option(help="random requests for each model, instruction set and dtype")] = 200,
    isa: Annotated[list[str] | None, typer.Option(help="instruction sets (repeatable)")] = None,
    rounds: Annotated[int, typer.Option(help="timed rounds of each case, after one that warms up")] = 7,
    model: Annotated[Path | None, typer.Option(help="time this model instead of the demo and a random one")] = None,
    seed: Annotated[int, typer.Option(help="of the random requests")] = 0,
) -> None:
    """Compare two checkouts."""
    num_different = 0
    with ExitStack() as stack:
        trees = [stack.enter_context(running(folder)) for folder in (old, new)]
        if part in ("bits", "both"):
            num_different = compare_bits(*trees, requests, isa or list(ISAS), seed)
        if part in ("speed", "both"):
            compare_speed(*trees, rounds, model)
    sys.exit(num_different > 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        typer.run(main)
