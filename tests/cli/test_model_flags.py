"""The command line offers what the engine has, with the engine's defaults."""

from dataclasses import fields

from quire.cli.model_flags import EngineFlags
from quire.engine.options import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, EngineOptions

# Settings of parts that have not landed: absent from --help, refused in Python.
NOT_LANDED = {"tensor_parallel_size"}
# What paging is compared with: for measurements, and a flag of `bench throughput` alone.
BASELINES = {"memory_policy", "batching"}
# Shares of clients, which only servers have: flags of `serve`.
SHARES = {"max_kv_share_per_key"}


def test_flags_are_the_engines_options() -> None:
    flags = {field.name for field in fields(EngineFlags)} - {"config"}
    assert flags == {field.name for field in fields(EngineOptions)} - NOT_LANDED - BASELINES - SHARES


def test_defaults_are_the_engines() -> None:
    resolved = {"max_num_seqs": DEFAULT_MAX_NUM_SEQS, "max_num_batched_tokens": DEFAULT_MAX_NUM_BATCHED_TOKENS}
    options = EngineOptions()
    for field in fields(EngineFlags):
        if field.name != "config":
            expected = resolved.get(field.name, getattr(options, field.name, None))
            assert field.default == expected, field.name
