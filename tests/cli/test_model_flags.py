"""The command line offers what the engine has, with the engine's defaults."""

import inspect
from dataclasses import fields

from quire.cli.flag_groups import with_flag_groups
from quire.cli.model_flags import OfflineOptions, SamplingFlags
from quire.core.sampling_params import SamplingParams
from quire.engine.options import EngineOptions

NO_FLAG = {
    "memory_policy",            # baselines, for measurements: flags of `bench throughput` alone
    "batching",
    "max_kv_share_per_key",     # shares of clients, which only servers have: a flag of `serve`
    "stall_limit", "start_timeout",  # for servers and ranks: a flag of `serve`
}


def test_flags_of_a_batch_are_the_engines_options_with_its_defaults() -> None:
    @with_flag_groups
    def command(engine: OfflineOptions) -> None:
        made.append(engine)

    made: list[EngineOptions] = []
    flags = inspect.signature(command).parameters
    assert flags.keys() == {field.name for field in fields(EngineOptions)} - NO_FLAG
    command(**{name: flag.default for name, flag in flags.items()})
    ours, default = made[0], EngineOptions()
    for field in fields(EngineOptions):
        meanings = (f"resolved_{field.name}", f"{field.name.removesuffix('_ms')}_s", field.name)
        of = next(each for each in meanings if hasattr(default, each))
        assert getattr(ours, of) == getattr(default, of), field.name


def test_answers_are_sampled_as_in_python_unless_a_flag_says_otherwise() -> None:
    assert SamplingFlags().params() == SamplingParams(max_tokens=128)
