"""Sessions of an LLM: continued, forked, saved, and restored by another engine, with the bits of a computation."""

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, InvalidRequestError, SessionError, UnknownPrefixError
from quire.engine.fleet.offline_fleet import BlockingFleet
from quire.engine.messages import SessionBlocks
from quire.engine.offline_sessions import OfflineSessions
from quire.engine.requests.input_processor import PreparedRequest
from quire.extension.isas import usable_isas
from support.answers import answers_of
from support.server import wait_until

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

TOKENS = [3 + number * 7 % 280 for number in range(100)]
MORE = [9, 8, 7]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
SIZES: dict[str, Any] = {"num_kv_blocks": 64, "max_num_seqs": 4, "max_model_len": 256}


def answer(llm: LLM, prompt: Any) -> Any:  # noqa: ANN401 (a prompt; an answer to compare)
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    return answers_of(output)


@pytest.fixture(scope="module")
def expected() -> Any:  # noqa: ANN401
    with LLM(**SIZES) as llm:
        return answer(llm, {"prompt_token_ids": TOKENS + MORE})


def saved(directory: Path, name: str = "one", salt: str | None = None, **settings: Any) -> None:  # noqa: ANN401
    with LLM(kv_disk_dir=directory, kv_disk_size="64MiB", kv_disk_write_policy="reused", **SIZES | settings) as llm:
        prompt: dict[str, Any] = {"prompt_token_ids": TOKENS} | ({} if salt is None else {"cache_salt": salt})
        llm.create_session(prompt).save(name)  # type: ignore[arg-type]


@pytest.mark.usefixtures("tests_frozen")
def test_store_of_a_session_is_freed_without_a_collection(tmp_path: Path) -> None:
    """It has a quarter of a megabyte in few objects, so collections of garbage in circles are too rare for it."""

    def num_stores() -> int:
        return sum(type(each).__name__ == "KVStore" for each in gc.get_objects())

    with LLM(kv_disk_dir=tmp_path / "kv", **SIZES) as llm:
        gc.collect()
        before = num_stores()
        gc.disable()
        try:
            for _ in range(3):
                session = llm.create_session({"prompt_token_ids": TOKENS})
                session.save("one")
                session.delete()
                llm.restore_session("one").delete()

            def are_freed() -> bool:
                answer(llm, {"prompt_token_ids": MORE})     # stores are closed between two steps
                return num_stores() <= before

            wait_until(are_freed)
        finally:
            gc.enable()


def test_session_is_continued_extended_forked_and_deleted(expected: Any) -> None:  # noqa: ANN401
    with LLM(**SIZES) as llm:
        session = llm.create_session({"prompt_token_ids": TOKENS[:50]})
        session.extend(TOKENS[50:])
        assert (session.num_tokens, session.token_ids) == (100, TOKENS)
        assert answer(llm, session.prompt(MORE)) == expected
        forked = session.fork(40)
        with pytest.raises(InvalidRequestError, match="at must be an integer from 1 to 100, got 101"):
            session.fork(101)
        session.delete()
        assert forked.token_ids == TOKENS[:40]
        with pytest.raises(UnknownPrefixError):
            session.delete()
        forked.delete()
        llm._engine.engine.scheduler.check()
        assert llm.kv_stats().used_blocks == 0


def test_restored_session_has_the_bits_of_a_computation(tmp_path: Path, expected: Any) -> None:  # noqa: ANN401
    saved(tmp_path)
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="64MiB", **SIZES) as llm:
        assert llm.saved_sessions() == ["one"]
        session = llm.restore_session("one")
        engine = llm._engine.engine
        assert engine.disk.stats()["loaded_blocks"] == 6
        assert answer(llm, session.prompt(MORE)) == expected
        session.delete()
        engine.scheduler.check()
        assert not engine.scheduler.cache.loads.others, "its store is no source any more"
        llm.delete_saved_session("one")
        with pytest.raises(SessionError, match="there is no saved session 'one'"):
            llm.restore_session("one")


def open_files(llm: LLM, directory: Path) -> list[str]:
    """Return the files of saved sessions that engines have open."""
    runner = llm._runner
    assert isinstance(runner, BlockingFleet)
    found = list[str]()
    for engine in runner._client.engines:
        for link in Path(f"/proc/{engine._connection.engine.process.pid}/fd").iterdir():
            with suppress(OSError):     # it has just been closed
                found.append(str(link.readlink()))
    return [path for path in found if path.startswith(str(directory / "sessions"))]


@pytest.mark.usefixtures("forked_processes")
def test_engines_of_their_own_processes_restore_where_the_request_runs(
    tmp_path: Path, expected: Any  # noqa: ANN401
) -> None:
    saved(tmp_path)
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="64MiB", data_parallel_size=2, **SIZES) as llm:
        sessions = [llm.restore_session("one") for _ in range(2)]
        assert llm.kv_stats().disk["loaded_blocks"] >= 6
        assert [answer(llm, each.prompt(MORE)) for each in sessions] == [expected] * 2
        sessions[1].save("two")
        assert llm.saved_sessions() == ["one", "two"]

        def fail(_prepared: PreparedRequest) -> None:
            assert open_files(llm, tmp_path), "the store of the session is open"
            raise ZeroDivisionError

        wait_until(lambda: not open_files(llm, tmp_path))
        with pytest.raises(ZeroDivisionError):
            OfflineSessions(llm._runner, fail, "model", str(tmp_path)).restore("one", None, None)
        wait_until(lambda: not open_files(llm, tmp_path))


@pytest.mark.parametrize(("settings", "differs"), [
    ({"dtype": "bfloat16"}, "weights"), ({"kv_cache_dtype": "int8_per_token_head"}, "kv_dtype"),
    ({"block_size": 32}, "block_size"), ({"cpu_isa": "portable"}, "arithmetic"),
], ids=["dtype", "kv_dtype", "block_size", "arithmetic"])  # fmt: skip
def test_what_differs_is_named(tmp_path: Path, settings: dict[str, Any], differs: str) -> None:
    saved(tmp_path, dtype="float32")
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="64MiB", **SIZES | {"dtype": "float32"} | settings) as llm:
        with pytest.raises(SessionError, match=f"cannot be restored: this engine has {differs} ") as failure:
            llm.restore_session("one")
        assert failure.value.code == "session_incompatible"
        llm._engine.engine.scheduler.check()
        assert llm.kv_stats().used_blocks == 0


def test_another_salt_or_adapter_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, salt="mine")
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="64MiB", enable_lora=True, **SIZES) as llm:
        for salt in (None, "yours"):
            with pytest.raises(SessionError, match="another cache_salt"):
                llm.restore_session("one", cache_salt=salt)
        assert llm.restore_session("one", cache_salt="mine").num_tokens == 100


def test_session_that_ends_while_it_is_saved_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="64MiB", **SIZES) as llm:
        session = llm.create_session({"prompt_token_ids": TOKENS})
        sessions = llm._engine.engine.disk.sessions
        copy = sessions._copy

        def unpin_and_copy(*given: Any) -> None:  # noqa: ANN401
            copy(*given)
            llm._engine.engine.abort(-1)

        monkeypatch.setattr(sessions, "_copy", unpin_and_copy)
        with pytest.raises(SessionError, match="unpinned while it was saved") as failure:
            session.save("one")
        assert failure.value.code == "session_gone"
        assert llm.saved_sessions() == []
        assert not [*tmp_path.glob("sessions/*/.*")]


def test_disk_that_is_full_saves_nothing_and_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Any  # noqa: ANN401
) -> None:
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="64MiB", **SIZES) as llm:
        session = llm.create_session({"prompt_token_ids": TOKENS})

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(llm._engine.engine.disk.sessions, "_open", full)
        with pytest.raises(SessionError, match="No space left on device") as failure:
            session.save("one")
        assert failure.value.code == "session_not_saved"
        assert llm.saved_sessions() == []
        assert answer(llm, session.prompt(MORE)) == expected


def test_save_is_answered_when_the_engine_closes(tmp_path: Path) -> None:
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="64MiB", **SIZES) as llm:
        llm.create_session({"prompt_token_ids": TOKENS})
        ended = list[SessionBlocks]()
        llm._engine.engine.disk.sessions.save(-1, tmp_path / "x", ended.append)
    assert [each.code for each in ended] == ["unusable"]


def test_sessions_without_a_folder_are_not_saved() -> None:
    with LLM(**SIZES) as llm, pytest.raises(ConfigError, match="kv_disk_dir"):
        llm.create_session({"prompt_token_ids": TOKENS}).save("one")
