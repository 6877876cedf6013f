"""Models by name: what is fetched of a hub, what is refused before, what is checked after, and commands on the cache.

The hub is a small server of this machine (support/hub_server.py), its client the real one.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ModelError
from quire.core.hub import HUB_FILES, HubName, aliases_file, gguf_tags, parse_hub_name, pick_gguf
from quire.engine.options import EngineOptions
from quire.model.resolve import DEMO_MODEL, resolve_model
from quire.server.options import ServerOptions
from support.command_line import Run
from support.gguf_files import convert
from support.hub_server import COMMIT, HubServer, running_hub

NAME, FILES = "quire/demo", {each.name for each in DEMO_MODEL.iterdir()}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with running_hub() as server:
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The hub with the demo model, an empty cache, and a file of aliases in an empty folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    server.repositories.clear()
    server.sent.clear()
    server.cdn_tokens.clear()
    server.add(NAME, DEMO_MODEL)
    return server


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return convert(DEMO_MODEL, tmp_path / "demo.gguf").read_bytes()


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def write_aliases(text: str) -> None:
    aliases_file().parent.mkdir(parents=True, exist_ok=True)
    aliases_file().write_text(text)


def test_pulled_model_is_listed_shown_served_without_the_hub_and_removed(
    hub: HubServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("pull", NAME)
    assert (ran.code, Path(ran.out.strip()).name) == (0, COMMIT)
    assert "5,328,128 parameters" in ran.err
    assert {f"{NAME}/{each}" for each in FILES - {"README.md"}} == hub.names_sent()
    offline(monkeypatch)
    listed = run("list").out.splitlines()
    assert listed[0].split() == ["NAME", "SIZE", "FETCHED", "REVISION"]
    assert listed[1].split()[0] == NAME
    shown = run("show", NAME).out
    assert "LlamaForCausalLM" in shown
    assert "2,048 tokens" in shown
    assert "HF_HUB_OFFLINE is set" in run("pull", NAME).err
    with LLM(NAME, num_kv_blocks=64) as llm:
        (output,) = llm.generate(["import os"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    assert run("rm", NAME).out.startswith(f"{NAME}: removed, 10.")
    assert run("list").out.startswith("nothing yet")
    ran = run("pull", NAME)
    assert ran.code == 1
    assert "HF_HUB_OFFLINE is set, so the hub is not asked, and its cache has no whole copy" in ran.err
    assert "is not in the hub's cache" in run("rm", NAME).err


def test_chat_begins_with_a_pull_where_there_is_no_copy(hub: HubServer, run: Run) -> None:
    flags = (NAME, "--max-tokens", "3", "--temperature", "0", "--num-kv-blocks", "64")
    first = run("run", *flags, stdin="import os\n")
    assert first.code == 0
    assert f"{NAME}/{WEIGHTS}" in hub.names_sent()
    hub.sent.clear()
    assert run("run", *flags, stdin="import os\n").out == first.out == run("chat", *flags, stdin="import os\n").out
    assert not hub.sent


def test_broken_transfer_is_resumed_where_it_broke(hub: HubServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    size, kept = (DEMO_MODEL / WEIGHTS).stat().st_size, constants.DOWNLOAD_CHUNK_SIZE  # the client writes whole chunks
    hub.repositories[NAME].cuts[WEIGHTS] = size - 1
    ran = run("pull", NAME)
    assert ran.code == 1
    assert "the transfer broke" in ran.err
    assert "the same command goes on from there" in ran.err
    hub.repositories[NAME].is_down = False
    ran = run("pull", NAME)
    assert ran.code == 0, ran.err
    parts = [(start, count) for name, start, count in hub.sent if name.endswith(WEIGHTS)]
    assert parts == [(0, size - 1), (kept, size - kept)]
    assert hub.cdn_tokens == {None}
    fetched = Path(ran.out.strip()) / WEIGHTS
    assert hashlib.sha256(fetched.read_bytes()).hexdigest() == hub.repositories[NAME].digest(WEIGHTS)


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"], ids=["sha256", "git"])
def test_file_with_another_digest_is_removed_and_fetched_again(name: str, hub: HubServer, run: Run) -> None:
    repository = hub.repositories[NAME]
    repository.told_digests[name] = "f" * (64 if name == WEIGHTS else 40)
    ran = run("pull", NAME)
    assert ran.code == 1
    assert f"{name}: content and digest differ, so what was fetched is removed; pull it again" in ran.err
    repository.told_digests.clear()
    hub.sent.clear()
    assert run("pull", NAME).code == 0
    assert hub.names_sent() == {f"{NAME}/{name}"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "of recurrent layers, gated delta nets and Mamba-2 are computed"),
        ({"architectures": ["NoSuchModel"], "model_type": "none"}, "NoSuchModel"),
        ({"num_hidden_layers": 4000, "hidden_size": 65536, "intermediate_size": 262144}, "does not fit: weights of"),
    ],
    ids=["family", "unknown", "memory"],
)
def test_what_cannot_run_here_is_told_before_any_weights(
    changes: dict[str, object], told: str, hub: HubServer, run: Run
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_bytes()) | changes
    hub.repositories[NAME].files["config.json"] = json.dumps(config).encode()
    ran = run("pull", NAME)
    assert ran.code == 1
    assert ran.err.startswith(f"quire: {NAME}")
    assert told in ran.err
    assert "--anyway fetches it all the same" in ran.err
    assert all(each.endswith(".json") for each in hub.names_sent())
    assert run("pull", NAME, "--anyway").code == 0
    assert f"{NAME}/{WEIGHTS}" in hub.names_sent()


def test_serve_makes_the_same_checks_with_its_own_options(
    hub: HubServer, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[EngineOptions] = []

    def start(engine: EngineOptions, options: ServerOptions, fetch: Callable[[EngineOptions], object]) -> None:
        fetch(engine)       # as a server that has its port
        started.append(engine)

    monkeypatch.setattr("quire.cli.serve.start", start)
    config = (DEMO_MODEL / "config.json").read_bytes()
    for changes, arguments, told in (
        ({"architectures": ["NoModelForCausalLM"]}, ("--model-impl", "quire"), "NoModelForCausalLM"),
        ({}, ("--num-kv-blocks", "1000000000000"), "are free"),
    ):
        hub.repositories[NAME].files["config.json"] = json.dumps(json.loads(config) | changes).encode()
        ran = run("serve", NAME, *arguments)
        assert (ran.code, started) == (1, [])
        assert told in ran.err
        assert f"quire pull {NAME} --anyway" in ran.err
        assert f"{NAME}/{WEIGHTS}" not in hub.names_sent()
        shutil.rmtree(tmp_path / "hub")
    hub.repositories[NAME].files["config.json"] = config
    assert run("serve", NAME, "--load-format", "dummy").code == 0
    assert f"{NAME}/{WEIGHTS}" not in hub.names_sent()
    assert run("serve", NAME).code == 0
    assert f"{NAME}/{WEIGHTS}" in hub.names_sent()
    hub.sent.clear()
    assert run("serve", NAME).code == run("serve", "quire/not-there").code == 0     # the engine tells what it tried
    assert not hub.names_sent()
    assert [engine.model for engine in started] == [NAME, NAME, NAME, "quire/not-there"]


def test_full_disk_is_told_before_anything_is_fetched(hub: HubServer, run: Run) -> None:
    class Endless(bytes):
        def __len__(self) -> int:
            return 2**60

    hub.repositories[NAME].files["model-2.safetensors"] = Endless()
    ran = run("pull", NAME, "--anyway")
    assert (ran.code, hub.sent) == (1, [])
    assert f"{NAME}: {2**60 + 10}"[:20] in ran.err
    assert " bytes are to be fetched, and " in ran.err


def test_one_gguf_file_is_picked_by_its_quantization(
    hub: HubServer, run: Run, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"demo-Q4_K_M.gguf": gguf, "demo-BF16.gguf": gguf[:-1], "mmproj-F16.gguf": b"GGUF", "README.md": b""}
    hub.add("quire/demo-GGUF", **files).gguf = {"architecture": "llama"}
    ran = run("pull", "quire/demo-GGUF")
    assert "has GGUF files: name one, as quire/demo-GGUF:BF16; there are BF16, Q4_K_M" in ran.err
    with pytest.raises(ModelError, match=r"has GGUF files: name one, as quire/demo-GGUF:BF16; there are"):
        resolve_model("quire/demo-GGUF")
    ran = run("pull", "quire/demo-GGUF:Q4_K_S")
    assert "no such GGUF file; there are BF16, Q4_K_M; did you mean Q4_K_M?" in ran.err
    assert not hub.sent
    ran = run("pull", "quire/demo-GGUF:q4_k_m")
    assert (ran.code, Path(ran.out.strip()).name) == (0, "demo-Q4_K_M.gguf")
    assert hub.names_sent() == {"quire/demo-GGUF/demo-Q4_K_M.gguf"}
    write_aliases('[models]\nmine = "quire/demo-GGUF:Q4_K_M"\n')
    assert str(resolve_model("mine")) == str(resolve_model("quire/demo-GGUF:Q4_K_M")) == ran.out.strip()
    offline(monkeypatch)
    assert str(resolve_model("mine")) == ran.out.strip()
    listed = run("list").out
    assert "quire/demo-GGUF:Q4_K_M" in listed
    assert "mine    quire/demo-GGUF:Q4_K_M" in listed
    assert "LlamaForCausalLM" in run("show", "mine").out
    assert "longest request" in run("plan", "mine").out
    with pytest.raises(ModelError, match=r"quire/demo-GGUF:BF16: no such GGUF file; there are Q4_K_M"):
        resolve_model("quire/demo-GGUF:BF16")
    assert run("rm", "mine").code == 0
    assert not Path(ran.out.strip()).exists()


def test_gguf_file_of_another_architecture_or_size_is_refused(hub: HubServer, run: Run) -> None:
    hub.add("a/b", **{"x-Q8_0.gguf": b"GGUF"}).gguf = {"architecture": "mamba2"}
    assert "architecture 'mamba2' of GGUF is not served" in run("pull", "a/b:Q8_0").err
    hub.add("a/c", **{"pytorch_model.bin": b"x", "config.json": b"{}"})
    assert "a/c: has no weights in safetensors or GGUF; files of pickles" in run("pull", "a/c").err
    assert not hub.sent


def test_names_of_the_hub_cannot_leave_the_folder(hub: HubServer, run: Run) -> None:
    for name in ("../evil.json", "/etc/evil.json", "a/../../evil.json", "..\\evil.json"):
        hub.add("a/b", DEMO_MODEL, **{name: b"{}"})
        ran = run("pull", "a/b")
        assert (ran.code, hub.sent) == (1, [])
        assert "outside of the model's folder" in ran.err


def test_repository_that_is_not_there_is_told(hub: HubServer, run: Run) -> None:
    ran = run("pull", "no/such")
    assert ran.code == 1
    assert "no/such: the hub could not give it (404 Client Error" in ran.err


def test_folders_and_their_aliases_need_no_hub(hub: HubServer, run: Run) -> None:
    write_aliases(f'[models]\ndemo = "{DEMO_MODEL}"\nbroken = "a/b/c"\n')
    assert run("pull", "demo").out == f"{DEMO_MODEL}\n"
    assert resolve_model("demo", HUB_FILES) == DEMO_MODEL
    assert "is a folder or file of yours" in run("rm", "demo").err
    with pytest.raises(ModelError, match="'broken', the alias of 'a/b/c': no such folder, and not a hub id"):
        resolve_model("broken")
    assert not hub.sent


@pytest.mark.parametrize("text", ["[models", "[models]\na = 1", "[x]", "models = 'a'", "[models]\na = ''", "\xff"])
def test_broken_file_of_aliases_is_named(text: str, hub: HubServer) -> None:
    write_aliases("")
    aliases_file().write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"models\.toml: (is not valid TOML|expected one table)"):
        resolve_model("name")


def test_names_are_read() -> None:
    assert parse_hub_name("gpt2") == HubName("gpt2")
    assert str(parse_hub_name("a/b:Q4_K_M")) == "a/b:Q4_K_M"
    assert not any(parse_hub_name(each) for each in ("a/b/c", "a/", "", "a/b:", ":x", "../b:x", "/a:b"))


def test_quantizations_are_read_from_names_of_files() -> None:
    parts = [f"q8/m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    files = ["m.Q4_0.gguf", "m-UD-Q4_K_XL.gguf", *parts, "odd.gguf"]
    assert gguf_tags(files) == ["Q4_0", "Q8_0", "UD-Q4_K_XL", "odd.gguf"]
    assert pick_gguf(HubName("a/b", "odd.gguf"), files) == "odd.gguf"
    assert pick_gguf(HubName("a/b", "UD-Q4_K_XL"), files) == files[1]
    with pytest.raises(ModelError, match="is in 2 parts"):
        pick_gguf(HubName("a/b", "Q8_0"), files)
    with pytest.raises(ModelError, match=r"fits several files: x/m\.Q4_0\.gguf, y/m\.Q4_0\.gguf"):
        pick_gguf(HubName("a/b", "Q4_0"), ["x/m.Q4_0.gguf", "y/m.Q4_0.gguf"])
