"""States on a disk: restarts, sessions, spoilt bytes and bounds, of models with gated delta nets and with Mamba-2."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import SessionError
from quire.engine.requests.saved_sessions import SavedSessions
from quire.extension.isas import usable_isas
from support.answers import answers_of
from support.random_folder import HYBRID, PARALLEL_HYBRID, write_random_folder

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

PROMPT = [3 + number * 7 % 280 for number in range(100)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
SIZES: dict[str, Any] = {"num_kv_blocks": 64, "max_num_seqs": 4, "max_model_len": 128, "kv_disk_size": "4MiB"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    configs = {"delta net": HYBRID, "mamba": PARALLEL_HYBRID}
    return {name: write_random_folder(root / name.replace(" ", "_"), config) for name, config in configs.items()}


def ask(model: Path, directory: Path | None, prompt: list[int] = PROMPT, **settings: Any) -> tuple[Any, int]:  # noqa: ANN401
    """Return the answer of an engine of its own with its logprobs, and the prompt tokens that came from the disk."""
    sizes = SIZES | settings if directory is not None else {"num_kv_blocks": 64, "max_model_len": 128} | settings
    sizes.pop("kv_disk_size") if directory is None and "kv_disk_size" in sizes else None
    with LLM(model, kv_disk_dir=directory, **sizes) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        llm._engine.engine.scheduler.check()
        assert output.num_cached_tokens == output.metrics.num_disk_tokens
        return answers_of(output), output.metrics.num_disk_tokens


KINDS = [("delta net", "float32"), ("mamba", "bfloat16"), ("delta net", "bfloat16"), ("mamba", "float32")]
ISAS = usable_isas()
IN_TURN = [(isa, *KINDS[number % len(KINDS)]) for number, isa in enumerate((*ISAS, *ISAS[: 1 + len(ISAS) % 2]))]


@pytest.mark.parametrize(("isa", "name", "dtype"), IN_TURN)
def test_restart_changes_no_bit_and_computes_only_the_rest(
    models: dict[str, Path], isa: str, name: str, dtype: str, tmp_path: Path
) -> None:
    """The answer of a first turn is stored as well, and the state behind it: the next turn begins there."""
    settings = {"dtype": dtype, "cpu_isa": isa}
    expected, _ = ask(models[name], None, **settings)
    assert ask(models[name], tmp_path / "kept", **settings) == (expected, 0)
    assert ask(models[name], tmp_path / "kept", **settings) == (expected, 96)
    turn = [*PROMPT, *expected[0].token_ids[:3], 5, 6, 7, *range(20, 30)]
    longer, _ = ask(models[name], None, turn, **settings)
    assert ask(models[name], tmp_path / "kept", turn, **settings) == (longer, 96)
    assert ask(models[name], tmp_path / "kept", turn, **settings) == (longer, 112)
    assert ask(models[name], tmp_path / "kept", PROMPT[:50], **settings)[1] == 0    # no state was kept there


@pytest.mark.parametrize("name", ["delta net", "mamba"])
def test_spoilt_bytes_anywhere_and_ends_in_the_middle_are_misses(
    models: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """One bit of each slot in turn, blocks and parts of states; and what is there while a store is written."""
    expected, _ = ask(models[name], None)
    ask(models[name], tmp_path / "kept")
    (blocks,) = (tmp_path / "kept").glob("*/0/blocks")
    slot_bytes = 4096 * -(-_block_bytes(models[name]) // 4096)
    used = [start for start in range(0, blocks.stat().st_size, slot_bytes) if any(_read(blocks, start, 64))]
    assert len(used) > 8, "blocks, and parts"
    for start in (used[1], used[6], used[-1]):
        copy = tmp_path / f"spoilt{start}"
        shutil.copytree(tmp_path / "kept", copy)
        (spoilt,) = copy.glob("*/0/blocks")
        with spoilt.open("r+b") as file:
            file.seek(start + 5)
            changed = file.read(1)[0] ^ 4
            file.seek(start + 5)
            file.write(bytes([changed]))
        assert ask(models[name], copy) == (expected, 0), f"slot at {start}"
        assert ask(models[name], copy) == (expected, 96), "written again"
    with LLM(models[name], kv_disk_dir=tmp_path / "slow", kv_disk_write_rate=200_000, **SIZES) as llm:
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
        shutil.copytree(tmp_path / "slow", tmp_path / "killed")     # what a SIGKILL at this point leaves
    (tmp_path / "killed").chmod(0o700)
    found, num_loaded = ask(models[name], tmp_path / "killed")
    assert (found, num_loaded in (0, 96)) == (expected, True)


def _block_bytes(model: Path) -> int:
    with LLM(model, num_kv_blocks=64, max_model_len=128) as llm:
        return llm._engine.ready.kv_bytes_per_token * 16


def _read(file: Path, start: int, count: int) -> bytes:
    with file.open("rb") as opened:
        return os.pread(opened.fileno(), count, start)


def test_bytes_on_the_disk_stay_within_the_bound(models: dict[str, Path], tmp_path: Path) -> None:
    """States and blocks share one order of eviction; a store that does not hold a run with its state has none."""
    prompts = [[number + 2 + place * 7 % 250 for place in range(100)] for number in range(12)]
    with LLM(models["mamba"], kv_disk_dir=tmp_path / "small", **SIZES | {"kv_disk_size": 900_000}) as llm:
        for prompt in prompts:
            llm.generate([prompt], GREEDY, use_tqdm=False)
        llm._engine.engine.disk.drain(60)
        llm._engine.engine.scheduler.check()
        stats = llm.kv_stats().disk
        assert stats["evicted_blocks"] > 0
    assert sum(each.lstat().st_blocks * 512 for each in (tmp_path / "small").rglob("*") if each.is_file()) <= 900_000
    assert ask(models["mamba"], tmp_path / "small", prompts[-1], kv_disk_size=900_000)[1] == 96
    expected, _ = ask(models["mamba"], None)
    for _ in range(2):
        assert ask(models["mamba"], tmp_path / "least", kv_disk_size=150_000) == (expected, 0)


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"speculative_config": '{"method": "ngram"}'}], ids=str
)
def test_other_states_are_another_folder(models: dict[str, Path], tmp_path: Path, other: dict[str, Any]) -> None:
    """Drafts make rings longer."""
    settings = {"dtype": "float32", "kv_disk_size": "1GiB"}     # room for both
    ask(models["mamba"], tmp_path, **settings)
    assert ask(models["mamba"], tmp_path, **settings | other)[1] == 0
    assert ask(models["mamba"], tmp_path, **settings)[1] == 96


@pytest.mark.parametrize("name", ["delta net", "mamba"])
def test_session_is_saved_exported_imported_restored_and_forked_with_its_state(
    models: dict[str, Path], name: str, tmp_path: Path
) -> None:
    more = [9, 8, 7]
    expected, _ = ask(models[name], None, PROMPT + more)
    settings = SIZES | {"kv_disk_write_policy": "reused"}
    with LLM(models[name], kv_disk_dir=tmp_path / "own", **settings) as llm:
        llm.create_session({"prompt_token_ids": PROMPT}).save("one")
    own, other = (SavedSessions(tmp_path / each) for each in ("own", "other"))
    own.export(own.owner_of(None), "one", tmp_path / "file")
    assert other.import_file(other.owner_of(None), "two", tmp_path / "file", 1 << 30).num_blocks == 6
    with LLM(models[name], kv_disk_dir=tmp_path / "other", **settings) as llm:
        session = llm.restore_session("two")
        assert llm.kv_stats().disk["loaded_blocks"] > 6, "blocks, and the parts of a state"
        for each in (session, session.fork()):
            (output,) = llm.generate([each.prompt(more)], GREEDY, use_tqdm=False)
            assert answers_of(output) == expected
            assert output.num_cached_tokens == 96
        llm._engine.engine.scheduler.check()


def test_snapshots_give_way_to_running_sequences_while_they_load(models: dict[str, Path], tmp_path: Path) -> None:
    """As few slots as the sequences of a step take, and prompts that load beside them."""
    prompts = [[number + 2 + place * 7 % 250 for place in range(100)] for number in range(6)]
    with LLM(models["delta net"], kv_disk_dir=tmp_path, **SIZES) as llm:
        expected = [answers_of(llm.generate([prompt], GREEDY, use_tqdm=False)[0]) for prompt in prompts]
    with LLM(models["delta net"], kv_disk_dir=tmp_path, num_state_slots=3, **SIZES | {"max_num_seqs": 2}) as llm:
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
        llm._engine.engine.scheduler.check()
        assert [answers_of(each) for each in found] == expected
        assert sum(each.metrics.num_disk_tokens for each in found) >= 96
        assert llm.kv_stats().states["used_slots"] == 0


def test_session_with_a_state_that_is_evicted_while_it_is_saved_is_not_saved(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that were copied are of no use, and another sequence may write to the slot."""
    with LLM(models["delta net"], kv_disk_dir=tmp_path, **SIZES | {"kv_disk_write_policy": "reused"}) as llm:
        session, engine = llm.create_session({"prompt_token_ids": PROMPT}), llm._engine.engine
        copy, tree = engine.disk.sessions._copy, engine.scheduler.cache.prefixes.snapshots

        def copy_a_block_and_evict(save: Any, store: Any, until_s: float) -> None:  # noqa: ANN401
            copy(save, store, 0.0)
            while tree.evict():
                pass

        monkeypatch.setattr(engine.disk.sessions, "_copy", copy_a_block_and_evict)
        with pytest.raises(SessionError, match="the session's state was evicted while it was saved"):
            session.save("one")
        monkeypatch.undo()
        session.save("tokens-alone")
        session.delete()
        assert llm.restore_session("tokens-alone").token_ids == PROMPT


@pytest.mark.parametrize("name", ["delta net", "mamba"])
def test_session_that_is_saved_late_has_its_state(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Pins of four sequences keep four of eight slots, whatever has run since; a fifth pin gives up the first's."""
    others = [[number + 2 + place * 7 % 250 for place in range(100)] for number in range(20)]
    settings, more = SIZES | {"kv_disk_write_policy": "reused", "max_model_len": 112, "num_kv_blocks": 96}, [9, 8, 7]
    prompts = [[own, *PROMPT[1:40]] for own in range(1, 6)]
    expected, _ = ask(models[name], None, prompts[1] + more)
    with LLM(models[name], kv_disk_dir=tmp_path, **settings) as llm:
        sessions = [llm.create_session({"prompt_token_ids": each}) for each in prompts]
        llm.generate(others, GREEDY, use_tqdm=False)
        assert llm.kv_stats().states["kept_slots"] == 4
        for number, each in enumerate(sessions):
            each.save(f"{number}")
        llm._engine.engine.scheduler.check()
    with LLM(models[name], kv_disk_dir=tmp_path, **settings) as llm:
        restored = [llm.restore_session(f"{number}") for number in range(5)]
        (output,) = llm.generate([restored[1].prompt(more)], GREEDY, use_tqdm=False)
        assert answers_of(output) == expected
        saved = SavedSessions(tmp_path)
        assert [saved.read(saved.owner_of(None), f"{number}")[0].num_blocks for number in range(5)] == [0, 2, 2, 2, 2]
