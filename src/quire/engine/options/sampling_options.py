"""Options of sampling: defaults of parameters, the seed, and the bound of logprobs."""

from dataclasses import dataclass
from functools import partial

from quire.core.errors import ConfigError
from quire.core.options import option, parse_json_object

_model = partial(option, panel="Model")

OVERRIDE = "override_generation_config"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SamplingOptions:
    """Defaults of requests, and limits of what they may ask for."""

    generation_config: str = _model(
        "auto", "defaults of sampling: auto (the model's generation_config.json), vllm (none), or a folder or hub id",
        metavar="SOURCE",
        row="source of the defaults of sampling parameters, and of tokens that end an answer: `auto`, the model's "
        "`generation_config.json`; `vllm`, no defaults; or a folder or hub id with such a file "
        "([below](#generation-config))",
    )  # fmt: skip
    override_generation_config: str = _model(
        "", "values before those of generation_config.json, as JSON", metavar="JSON",
        row="keys of `generation_config.json` as JSON (in Python also a dict), which come before those of the file",
    )  # fmt: skip
    seed: int = _model(
        0, "of requests that bring none", row="of the engine: a request without a seed draws from this and its number"
    )
    max_logprobs: int = _model(
        20, "highest logprobs and prompt_logprobs of a request; -1: the size of the vocabulary", low=-1,
        row="highest `logprobs` and `prompt_logprobs` of a request; -1: the size of the vocabulary",
    )  # fmt: skip

    def _check_sampling(self) -> None:
        if not self.generation_config:
            raise ConfigError("generation_config must be auto, vllm, a folder or a hub id, got ''")
        parse_json_object(self.override_generation_config, OVERRIDE)
