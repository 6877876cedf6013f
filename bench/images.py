"""Images: an encoder beside transformers' and llama.cpp's, later questions about an image, and text without images.

    python bench/images.py --files FOLDER           # written at first: CLIP-L/336 and a small Llama, random weights
    python bench/images.py --files FOLDER --llama-cpp LIBRARIES --mtmd libmtmd.so --llama-server PROGRAM

FOLDER gets the model as a folder and as llama.cpp's two files. LIBRARIES are llama.cpp 0.5.0's (`make real`);
libmtmd and llama-server are in no package, and are built from the same version's source, the first of them as in
findings/llama_cpp_llava_class_token.sh; the libraries lie beside llama-server. A and B alternate, and medians and
ranges of all rounds are printed. All have as many threads. `--only` chooses a part. With `OMP_NUM_THREADS=1` times in
process are of the CPU: beside other work two threads of llama.cpp spin at barriers.
"""

import base64
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from quire import LLM, SamplingParams
from quire.core.image_processing import PreparedImage
from quire.core.images import PromptImage
from quire.core.token_ids import pack_tokens
from quire.engine.requests.input_processor import TokenizedPrompt

CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768, "hidden_act": "quick_gelu",
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096,
}  # fmt: skip
SIDE, NUM_ROWS = 336, 576
IN_TURN = ("later questions about one image", "later questions behind one text")  # as long, NUM_IN_TURN of each in turn
NUM_IN_TURN = 60
GGUF_TYPES = {"bfloat16": "bf16", "float16": "f16"}
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
ANSWER = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a call."""
    began_s = clock()
    run()
    return clock() - began_s


def shown(name: str, seconds: list[float]) -> None:
    """Print the median and the range of some times."""
    print(f"{name}: {statistics.median(seconds) * 1e3:.1f} ms ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})")


def in_turn(rounds: int, threads: int, runs: dict[str, Callable[[], object]]) -> None:
    """Print the median and the range of each call's times; all are called once before."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            seconds[name].append(timed(run, time.process_time if threads == 1 else time.perf_counter))
    for name, (_, *each) in seconds.items():
        shown(name, each)


def write(folder: Path) -> None:
    """Write the model: in bfloat16 as a folder, and as files in bfloat16 and in float16."""
    import torch  # noqa: PLC0415 (for comparisons alone)
    import transformers  # noqa: PLC0415
    from tokenizers import AddedToken  # noqa: PLC0415

    from support.gguf_files import Stored, as_is, write_with_projector  # noqa: PLC0415 (needs torch)
    from support.small_tokenizers import byte_level, save  # noqa: PLC0415
    from support.small_vision import IMAGE, PROCESSOR, TEMPLATE  # noqa: PLC0415

    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    image = tokenizer.token_to_id(IMAGE)
    config = transformers.LlavaConfig(
        text_config=LLAMA | {"vocab_size": image + 1}, vision_config=CLIP, image_token_index=image
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).bfloat16()
    (own := folder / "model").mkdir(parents=True)
    model.save_pretrained(own)
    save(tokenizer, own, chat_template=TEMPLATE)
    edges = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    (own / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | edges))
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):

        def convert(name: str, each: torch.Tensor, dtype: torch.dtype = dtype) -> Stored:
            is_table = name.startswith("v.") and "_embd" in name  # mtmd has no convolution of bfloat16
            return as_is(name, each.to(torch.float32 if is_table else dtype))

        (folder / kind).mkdir()
        write_with_projector(own, folder / kind, convert)
        (folder / kind / "model.safetensors").unlink()


def encoders(
    files: Path, rounds: int, dtypes: list[str], libraries: Path | None, mtmd: Path | None, threads: int
) -> None:
    """Time the encoder and projector in some dtypes."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    given = np.random.default_rng(0).standard_normal((3, SIDE, SIDE), np.float32)
    for dtype in dtypes:
        kind = GGUF_TYPES[dtype]
        theirs = transformers.LlavaForConditionalGeneration.from_pretrained(files / "model", dtype=dtype).eval().model
        torch.set_num_threads(threads)
        tensor = torch.from_numpy(given)[None].to(theirs.dtype)

        def encode(theirs: Any = theirs, tensor: Any = tensor) -> None:  # noqa: ANN401
            with torch.inference_mode():
                theirs.get_image_features(tensor)

        settings: dict[str, Any] = {"dtype": dtype, "num_kv_blocks": 64}
        with LLM(files / "model", **settings) as llm, LLM(files / "model", quantization="int8", **settings) as rounded:
            tower, of_int8 = (each._engine.model.vision for each in (llm, rounded))  # type: ignore[attr-defined]
            runs: dict[str, Callable[[], object]] = {
                f"Quire's encoder, {dtype}": partial(tower.encode, given), f"transformers' encoder, {dtype}": encode,
                f"Quire's encoder, {dtype}, quantization int8": partial(of_int8.encode, given),
            }  # fmt: skip
            if libraries is not None and mtmd is not None:
                from support import llama_cpp  # noqa: PLC0415 (a module of tests/)
                from support.mtmd import Mtmd  # noqa: PLC0415

                text = llama_cpp.LlamaCpp(libraries, files / kind / "text.gguf", 256)
                other = Mtmd(mtmd, text, files / kind / "mmproj.gguf", threads)
                runs[f"mtmd's encoder, {kind} (22 of its 23 layers)"] = partial(other.encode, other.chunk(pixels), 1024)
            in_turn(rounds, threads, runs)


def questions(files: Path, rounds: int, threads: int) -> None:
    """Time the first token of later questions about an image, and of text behind a cached prefix, in one process."""
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    with LLM(files / "model", num_kv_blocks=256) as llm:
        inputs = llm._engine.ready.images
        assert inputs is not None

        def first_token(parts: list[int], image: bool, question: int) -> None:
            ids = [*parts, *(10 + (question * 16 + each) * 7 % 300 for each in range(16))]
            found = PromptImage(8, NUM_ROWS, 1, PreparedImage(SIDE, SIDE, (24, 24), pixels.tobytes()))
            prompt = TokenizedPrompt(None, pack_tokens(ids), images=(found,) if image else ())
            llm._finish_all(llm._prepare([prompt], ONE_TOKEN), use_tqdm=False)

        behind_image = [*range(100, 108), *[inputs.settings.image_token_id] * NUM_ROWS]
        behind_text = [*range(200, 208), *(10 + each * 5 % 300 for each in range(NUM_ROWS))]
        print(f"first question about an image: {timed(lambda: first_token(behind_image, True, 0)) * 1e3:.1f} ms")
        numbers = iter(range(1, 1 << 20))
        in_turn(4 * rounds, threads, {
            "later question about it": lambda: first_token(behind_image, True, next(numbers)),
            "text behind a cached prefix": lambda: first_token(behind_text, False, next(numbers)),
        })  # fmt: skip


def texts(files: Path, rounds: int, threads: int) -> None:
    """Time prompts of 512 tokens with answers of 64, on the model and on its text model."""
    text = files / "text"
    text.mkdir(exist_ok=True)
    config = json.loads((files / "model" / "config.json").read_text())
    own = config["text_config"] | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (text / "config.json").write_text(json.dumps(own))
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "num_kv_blocks": 256}
    with LLM(files / "model", **settings) as with_images, LLM(text, **settings) as alone:
        numbers = iter(range(1, 1 << 20))

        def answer(llm: LLM) -> None:
            number = next(numbers) // 2
            ids = [10 + (each * each + number) % 300 for each in range(512)]
            llm.generate([{"prompt_token_ids": ids}], ANSWER, use_tqdm=False)

        in_turn(4 * rounds, threads, {
            "text on the model of images": lambda: answer(with_images), "text on its text model": lambda: answer(alone),
        })  # fmt: skip


def cpu_s(parent: int) -> float:
    """Return the CPU seconds of a process and its children."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            own = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in (int(folder.name), own):
                total += sum(int(each.read_text().split()[0]) for each in folder.glob("task/*/schedstat"))
    return total / 1e9


@contextmanager
def serving(command: list[str], port: int) -> Iterator[int]:
    """Run a server until it is ready, yield the number of its process, and end it."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                        break
                except OSError:
                    assert process.poll() is None, command
                    time.sleep(0.1)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def asking(port: int, image: str | None, question: str) -> urllib.request.Request:
    """Return a request of one token; a client's JSON of an image takes a millisecond, which is no server's."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if image is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    return urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def send(request: urllib.request.Request) -> None:
    """Send a request, and read its answer."""
    with urllib.request.urlopen(request) as reply:
        reply.read()


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def servers(files: Path, rounds: int, dtypes: list[str], llama_server: Path | None, threads: int) -> None:
    """Time one token over HTTP, of questions about images and behind a text, of the same two files."""
    urls = []
    for seed in range(rounds + 2):
        buffer = BytesIO()
        noise = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(noise).save(buffer, "PNG", compress_level=1)
        urls.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    quire = shutil.which("quire", path=Path(sys.executable).parent)
    assert quire is not None
    known = " ".join(f"w{number * 7 % 97}" for number in range(200))
    for dtype in dtypes:
        text, projector = (str(files / GGUF_TYPES[dtype] / name) for name in ("text.gguf", "mmproj.gguf"))
        ports = {"Quire": free_port(), "llama-server": free_port()}
        commands = {
            "Quire": [quire, "serve", text, "--mmproj", projector, "--port", str(ports["Quire"])],
            "llama-server": [
                str(llama_server), "-m", text, "--mmproj", projector, "-t", str(threads), "-c", "4096", "-np", "1",
                "--jinja", "--port", str(ports["llama-server"]),
            ],
        }  # fmt: skip
        for name, command in commands.items():
            if name != "Quire" and llama_server is None:
                continue
            asked = ("first question", "next question", "after another image", "behind a text", *IN_TURN)
            seconds: dict[str, list[float]] = {each: [] for each in asked}
            of_cpu: dict[str, list[float]] = {each: [] for each in asked}
            with serving(command, port := ports[name]) as process:

                def time_one(what: str, url: str | None, question: str) -> None:
                    request, before_s = asking(port, url, question), cpu_s(process)
                    seconds[what].append(timed(lambda: send(request)))  # noqa: B023
                    of_cpu[what].append(cpu_s(process) - before_s)  # noqa: B023

                send(asking(port, urls[-1], "Warm?"))
                for number, url in enumerate(urls[:rounds]):
                    time_one(asked[0], url, "What is it?")
                    time_one(asked[1], url, "Which colours?")
                    send(asking(port, urls[-2], f"Number {number}?"))
                    time_one(asked[2], url, "Is it noise?")
                    send(asking(port, None, f"{known} {number}?"))
                    time_one(asked[3], None, f"{known} Which colours?")
                for number in range(NUM_IN_TURN):
                    time_one(IN_TURN[0], urls[0], f"And {number}?")
                    time_one(IN_TURN[1], None, f"{known} And {number}?")
            for what in asked:
                shown(f"{name}, {dtype}, {what}", seconds[what])
                shown(f"{name}, {dtype}, {what}, CPU of all processes", of_cpu[what])


def main(
    files: Annotated[Path, typer.Option()],
    llama_cpp_folder: Annotated[Path | None, typer.Option("--llama-cpp")] = None,
    mtmd: Path | None = None, llama_server: Path | None = None, rounds: int = 5, only: str = "",
    dtypes: str = "bfloat16,float16",
) -> None:  # fmt: skip
    """Print the times of all parts, or of one: write, encoders, questions, texts, servers."""
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    if not files.exists():
        write(files)
    if only in ("", "encoders"):
        encoders(files, rounds, dtypes.split(","), llama_cpp_folder, mtmd, threads)
    if only in ("", "questions"):
        questions(files, rounds, threads)
    if only in ("", "texts"):
        texts(files, rounds, threads)
    if only == "servers" or (not only and llama_server is not None):
        servers(files, rounds, dtypes.split(","), llama_server, threads)


if __name__ == "__main__":
    typer.run(main)
