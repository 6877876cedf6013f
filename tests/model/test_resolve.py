"""Where a model is looked for."""

import shutil
from pathlib import Path

import pytest

from quire.core import hub
from quire.core.errors import ModelError
from quire.core.hub import cause
from quire.model import resolve
from quire.model.resolve import DEMO_MODEL, resolve_model, resolve_tokenizer


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    for name in ("model.gguf", "model.bin"):
        (tmp_path / name).write_bytes(b"GGUF")
        assert resolve_model(str(tmp_path / name)) == tmp_path / name


def test_any_other_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelError, match="is no GGUF file; expected one, or a folder"):
        resolve_model(str(file))


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "../no-such-folder", "owner/", "~/no-such-model", ""])
def test_what_is_neither_folder_nor_hub_id_asks_no_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot", None)
    with pytest.raises(ModelError, match="no such folder, and not a hub id"):
        resolve_model(name)


def test_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^'a{80}': is no folder and no file: File name too long"):
        resolve_model("a" * 5000)


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real hub client with an empty cache and no network; return the cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_hub_id_without_network_says_what_was_tried(offline_hub: Path) -> None:
    told = r"owner/name: no such local folder; the hub could not give it .*; and the hub's local"
    with pytest.raises(ModelError, match=told):
        resolve_model("owner/name")
    with pytest.raises(ModelError, match="no such local folder"):
        resolve_model("an id with spaces")


def test_missing_gguf_file_is_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing\.gguf: no such file$"):
        resolve_model("missing.gguf")


@pytest.mark.parametrize("told", ["Got: ConnectError: no route", "An error happened (Got: ReadTimeout: no route)"])
def test_cause_of_a_failed_download_names_no_class(told: str) -> None:
    assert cause(OSError(told)).endswith("no route")
    assert "Got" not in cause(OSError(told))


def test_hub_id_without_network_is_found_in_the_cache(offline_hub: Path) -> None:
    model = offline_hub / "models--owner--name"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    assert resolve_model("owner/name") == snapshot
    with pytest.raises(ModelError, match=r"owner/name \(revision 'v2'\): no such local folder; the hub could not"):
        resolve_model("owner/name", revision="v2")
    older = model / "snapshots" / ("1" * 40)
    older.mkdir()
    (older / "config.json").write_text("{}")
    (model / "refs" / "v2").write_text("1" * 40)
    for revision, found in (("v2", older), ("1" * 40, older), ("main", snapshot), (None, snapshot)):
        assert resolve_model("owner/name", revision=revision) == found
        assert resolve_tokenizer("owner/name", Path("model"), revision) == found
    assert resolve_tokenizer(None, Path("model"), "v2") == Path("model")


def test_folders_have_no_revisions(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), revision="v2") == tmp_path


def test_no_name_is_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DEMO_MODEL.parent == Path(resolve.__file__).parent
    monkeypatch.setattr(resolve, "DEMO_MODEL", tmp_path)
    with pytest.raises(ModelError, match="bundled demo model is not in this installation"):
        resolve_model(None)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(None) == tmp_path
    shutil.rmtree(tmp_path)
