"""Sessions with images: continued, forked, saved, and restored by engines that number images anew."""

import math
import os
import shutil
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.core.errors import InvalidRequestError, SessionError
from quire.engine import kv_reads
from quire.engine.options import EngineOptions
from quire.engine.requests.saved_sessions import SavedSessions
from quire.extension.isas import usable_isas
from quire.server.api import sessions
from quire.server.api.sessions import Sessions
from support.answers import answers_of
from support.openai_server import OpenAIServer, openai_server
from support.small_vision import write_gemma3, write_llava, write_qwen_vl

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

SESSIONS, COMPLETIONS, CHAT = "/v1/sessions", "/v1/completions", "/v1/chat/completions"
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
SIZES: dict[str, Any] = {"num_kv_blocks": 160, "block_size": 8, "max_num_seqs": 4, "dtype": "float32"}
MORE = [9, 8, 7]
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llava": write_llava, "gemma3": write_gemma3, "qwen2_5_vl": partial(write_qwen_vl, family="Qwen2_5_VL"),
    "qwen3_5": partial(write_qwen_vl, family="Qwen3_5"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in FAMILIES.items()}


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def asked(number: int, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": picture(number)}, {"type": "text", "text": text}]}


def answer(llm: LLM, prompt: Any) -> Any:  # noqa: ANN401 (a prompt; an answer to compare)
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    llm._engine.engine.scheduler.check()
    return answers_of(output)


@pytest.mark.parametrize("family", FAMILIES)
def test_session_with_images_is_saved_exported_imported_restored_and_forked(
    folders: dict[str, Path], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_reads, "READ_LIMIT_S", math.inf)     # no read is given up on a slow machine
    folder, conversation = folders[family], [asked(1, "What is it?"), asked(2, "And this? " * 3)]
    settings = SIZES | {"kv_disk_size": "16MiB", "kv_disk_write_policy": "reused"}
    with LLM(folder, **SIZES) as llm:
        session = llm.create_session(conversation)
        tokens, images = session.token_ids, session.prompt()["images"]
        whole = {"prompt_token_ids": [*tokens, *MORE], "images": images}
    with LLM(folder, **SIZES, enable_prefix_caching=False) as llm:
        expected, of_tokens = answer(llm, whole), answer(llm, {"prompt_token_ids": [*tokens, *MORE]})
    assert expected != of_tokens
    with LLM(folder, kv_disk_dir=tmp_path / "own", **settings) as llm:
        session = llm.create_session(conversation)
        assert answer(llm, session.prompt(MORE)) == expected
        session.save("one")
    own, other = (SavedSessions(tmp_path / each) for each in ("own", "other"))
    own.export(own.owner_of(None), "one", tmp_path / "file")
    other.import_file(other.owner_of(None), "two", tmp_path / "file", 1 << 30)
    with LLM(folder, kv_disk_dir=tmp_path / "other", **settings) as llm:
        llm.chat([[asked(2, "first")], [asked(3, "second")]], GREEDY, use_tqdm=False)   # 0 and 1 are other images here
        session = llm.restore_session("two")
        num_blocks = len(tokens) // 8 - (family == "qwen3_5" and len(tokens) % 8 == 0)
        assert llm.kv_stats().disk["loaded_blocks"] >= num_blocks - 1
        for each in (session, session.fork(), session.fork(images[1].start)):
            rest = tokens[each.num_tokens :]
            if rest:
                assert len(each.prompt()["images"]) == 1
                continue
            assert answer(llm, each.prompt(MORE)) == expected
        session.extend(MORE)
        assert answer(llm, session.prompt()) == expected
        message = f"at must not be inside of the image of tokens {images[1].start} to .*, got {images[1].start + 1}"
        with pytest.raises(InvalidRequestError, match=message):
            session.fork(images[1].start + 1)


def test_spoilt_and_missing_pixels_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    """They are compared with their digests; a description with other sizes is refused, too."""
    folder, settings = folders["llava"], SIZES | {"kv_disk_dir": tmp_path, "kv_disk_size": "16MiB"}
    with LLM(folder, **settings) as llm:
        llm.create_session([asked(1, "What?"), asked(1, "Again?")]).save("one")
        (file,) = tmp_path.glob("sessions/*/one/images")
        pixels = file.read_bytes()
        assert len(pixels) == 28 * 28 * 3, "equal images are written once"
        for spoilt, reason in ((b"\0" + pixels[1:], "image 0 are spoilt"), (pixels[1:], "2351 bytes, not 2352")):
            file.write_bytes(spoilt)
            with pytest.raises(SessionError, match=f"images of the saved session 'one' cannot be read: .*{reason}"):
                llm.restore_session("one")
        file.unlink()
        with pytest.raises(SessionError, match="No such file"):
            llm.restore_session("one")
    refused = pytest.raises(SessionError, match="session 'one' has 2 images, and this engine reads none")
    with LLM(folder, **settings, skip_tokenizer_init=True) as llm, refused:
        llm.restore_session("one")


def part(number: int) -> dict[str, Any]:
    buffer = BytesIO()
    picture(number).save(buffer, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"}}


def message(number: int, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [part(number), {"type": "text", "text": text}]}


def chat(server: OpenAIServer, messages: list[dict[str, Any]], **body: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return the message of an answer and its logprobs."""
    asked = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": True, "messages": messages}
    choice = server.ask(CHAT, **asked | body)["choices"][0]
    return choice["message"], choice["logprobs"]


def served(folder: Path, directory: Path, **options: Any) -> Any:  # noqa: ANN401 (a context with a server)
    engine = EngineOptions(model=str(folder), kv_disk_dir=str(directory), kv_disk_size="16MiB", **SIZES)
    return openai_server(engine, max_pinned_share=1.0, **options)


def test_server_keeps_images_of_sessions_and_restores_them(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["qwen2_5_vl"]
    first, second, third = message(1, "What is it?"), message(2, "And this?"), message(3, "Both?")
    said, why = {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Why?"}
    with served(folder, tmp_path / "own") as server:
        session = server.ask(SESSIONS, messages=[first], cache_salt="mine")
        path = f"{SESSIONS}/{session['id']}"
        named = {"session_id": session["id"]}
        whole = chat(server, [first, why], cache_salt="mine")
        assert chat(server, [why], **named) == whole
        assert chat(server, [message(2, "What is it?"), why], cache_salt="mine") != whole
        server.ask(f"{path}/extend", messages=[said, second])
        assert server.ask(f"{path}/fork")["num_tokens"] == server.http.get(path).json()["num_tokens"]
        status, error = server.refusal(f"{path}/fork", at=8)
        assert (status, error["param"]) == (400, "at")
        after = chat(server, [first, said, second, why], cache_salt="mine")
        assert chat(server, [why], **named) == after
        server.ask(f"{path}/save", name="one")
        own = server.service.options
        (file,) = tmp_path.glob("own/sessions/*/one/images")
        num_bytes = 3 * file.stat().st_size // 2    # of three images in place of two
        monkeypatch.setattr(server.service, "options", replace(own, max_session_image_bytes=num_bytes - 1))
        status, error = server.refusal(f"{path}/extend", messages=[third])
        told = f"the images of the session take {num_bytes} bytes, at most {num_bytes - 1} (max_session_image_bytes)"
        assert (status, error["message"]) == (400, told)
        monkeypatch.setattr(server.service, "options", own)
        server.ask(f"{path}/extend", messages=[third])
        longest = chat(server, [first, said, second, third, why], cache_salt="mine")
    shutil.copytree(tmp_path / "own" / "sessions", tmp_path / "other" / "sessions")
    (tmp_path / "other").chmod(0o700)
    monkeypatch.setattr(sessions, "MAX_OPEN_STORES", 1)
    read_alone, images_of = list[bool](), Sessions._images_of

    def watched(own: Sessions, *given: Any) -> Any:  # noqa: ANN401 (as the method)
        read_alone.append(own._restoring.locked())
        return images_of(own, *given)

    monkeypatch.setattr(Sessions, "_images_of", watched)
    with served(folder, tmp_path / "other") as server:
        chat(server, [third, second], cache_salt="mine")    # their numbers are others here
        session = server.ask(SESSIONS, restore="one", cache_salt="mine")
        assert read_alone == [True], "the pixels of many sessions that are restored at once would fill the memory"
        named = {"session_id": session["id"]}
        assert chat(server, [why], **named) == after
        server.ask(f"{SESSIONS}/{session['id']}/extend", messages=[third])
        assert chat(server, [why], **named) == longest
        known = server.http.get(f"{SESSIONS}/{session['id']}").json()["num_tokens"]
        answered = server.ask(COMPLETIONS, prompt=" so", max_tokens=3, ignore_eos=True, **named)
        server.ask(f"{SESSIONS}/{session['id']}/extend", answer_id=answered["id"])
        assert server.http.get(f"{SESSIONS}/{session['id']}").json()["num_tokens"] > known + 3
        status, error = server.refusal(SESSIONS, answer_id=answered["id"])
        assert (status, error["message"]) == (400, "answer_id: the answer is to images, and pixels are not kept")
        monkeypatch.setattr(server.service, "options", replace(server.service.options, max_session_image_bytes=28))
        status, error = server.refusal(SESSIONS, restore="one", cache_salt="mine")
        assert (status, error["code"]) == (400, "session_limit")
