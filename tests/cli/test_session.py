"""`quire session warm`, `export` and `import`: a session in another directory has the same bits, or is refused."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import SessionError
from quire.engine.requests.saved_sessions import SavedSessions
from quire.extension.isas import usable_isas
from support.answers import answers_of
from support.command_line import Run

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

TEXT = "import os\nimport sys\n\n\ndef main():\n    print(os.getcwd(), sys.argv)\n" * 4
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)


def test_warmed_session_is_exported_imported_and_restored(run: Run, tmp_path: Path) -> None:
    text, first, second, file = tmp_path / "text", tmp_path / "first", tmp_path / "second", tmp_path / "session.tar"
    text.write_text(TEXT)
    directory = ("--kv-disk-dir", str(first))
    made = run("session", "warm", "--prompt", str(text), "--name", "a", "--max-model-len", "512", *directory)
    assert made.code == 0, made.err
    exported = run("session", "export", "--name", "a", "-o", str(file), *directory)
    assert exported.code == 0, exported.err
    imported = run("session", "import", str(file), "--name", "b", "--kv-disk-dir", str(second))
    assert imported.code == 0, imported.err
    with LLM(num_kv_blocks=256, max_model_len=512, kv_disk_dir=second, kv_disk_size="64MiB") as llm:
        assert llm.saved_sessions() == ["b"]
        session = llm.restore_session("b")
        assert llm.kv_stats().disk["loaded_blocks"] == session.num_tokens // 16
        assert f"a: {session.num_tokens} tokens" in made.out
        whole = {"prompt_token_ids": [*llm.get_tokenizer().encode(TEXT), 9]}
        restored, computed = llm.generate([session.prompt([9]), whole], GREEDY, use_tqdm=False)
        assert answers_of(restored) == answers_of(computed)


def test_session_of_a_key_is_not_that_of_clients_without_keys(run: Run, tmp_path: Path) -> None:
    with LLM(num_kv_blocks=64, max_model_len=256, kv_disk_dir=tmp_path / "kv", kv_disk_size="64MiB") as llm:
        llm.create_session([5] * 40).save("a")
    file, directory = tmp_path / "file", ("--kv-disk-dir", str(tmp_path / "kv"))
    assert run("session", "export", "--name", "a", "-o", str(file), *directory).code == 0
    assert run("session", "import", str(file), "--name", "b", "--api-key", "mine", *directory).code == 0
    saved = SavedSessions(tmp_path / "kv")
    assert [each.name for each, _ in saved.each(saved.owner_of("mine"))] == ["b"]
    assert [each.name for each, _ in saved.each(saved.owner_of(None))] == ["a"]
    failed = run("session", "export", "--name", "b", "-o", str(file), *directory)
    assert failed.code == 1
    assert "there is no saved session 'b'" in failed.err


def member(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a tar file with one member."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size, info.type, info.linkname = len(content) if kind == tarfile.REGTYPE else 0, kind, "/etc/passwd"
        archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def description(text: str) -> bytes:
    """Return a tar file with a `session.json` that has the right digest."""
    return member("session.json", hashlib.sha256(text.encode()).hexdigest().encode() + b"\n" + text.encode())


IMAGE = {"start": 0, "num_tokens": 4, "height": 2.0, "width": 2, "rows": 1, "columns": 1, "digest": ""}


@pytest.mark.parametrize(("content", "message"), [
    (b"", "is not read as a session"), (b"no tar file" * 100, "is not read as a session"),
    (member("../escaped"), "which is no file of a session"), (member("/tmp/escaped"), "which is no file of a session"),
    (member("blocks", kind=tarfile.SYMTYPE), "'blocks', which is no file"),
    (member("blocks", b"x" * 2000), "more than 1000 bytes"), (member("session.json"), "session.json is spoilt"),
    (member("blocks"), "No such file or directory"), (description('"text"'), "session.json is no JSON object"),
    (description(json.dumps({"images": [IMAGE]})), "height of an image must be an integer, got 2.0"),
], ids=[
    "empty", "no tar", "parent", "absolute", "link", "large", "spoilt", "without a description", "text", "image",
])  # fmt: skip
def test_hostile_file_leaves_nothing(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    saved = SavedSessions(tmp_path / "kv")
    with pytest.raises(SessionError, match=message):
        saved.import_file(saved.owner_of(None), "a", file, 1000)
    assert [path.name for path in (tmp_path / "kv" / "sessions" / saved.owner_of(None)).iterdir()] == []
    assert not (tmp_path / "escaped").exists()


def test_unfinished_folders_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    saved = SavedSessions(tmp_path / "kv")
    owner = saved.owner_of(None)
    alive = saved.begin(owner)
    alive.mkdir()
    dead = [alive.with_name(".new-99999999-ab-cd"), alive.with_name(f".new-{alive.name.split('-')[1]}-other-cd")]
    for folder in dead:
        folder.mkdir()
    saved.begin(owner)
    assert alive.exists()
    assert not [folder for folder in dead if folder.exists()], "also that of a process that had this one's number"
