"""StructuredOutputsConfig: the JSON of `--structured-outputs-config`, and of `LLM`, in vLLM's names."""

import logging
from dataclasses import replace

import msgspec

from quire.core.errors import ConfigError
from quire.core.structured_outputs import StructuredOutputsParams

log = logging.getLogger(__name__)


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of all requests with a grammar. Grammars are llguidance's, whatever `backend` names."""

    backend: str = "auto"
    disable_fallback: bool = False                  # no effect: there is one back end
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""                      # no effect: `--reasoning-parser` of a server has it
    enable_in_reasoning: bool = False               # the grammar holds from the first token on

    def with_defaults(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return parameters with the options of JSON that are on here, or `params` itself if that changes nothing."""
        no_blanks = self.disable_any_whitespace or params.disable_any_whitespace
        closed = self.disable_additional_properties or params.disable_additional_properties
        if (no_blanks, closed) == (params.disable_any_whitespace, params.disable_additional_properties):
            return params
        return replace(params, disable_any_whitespace=no_blanks, disable_additional_properties=closed)


def parse_config(text: str) -> StructuredOutputsConfig:
    """Return the configuration of a JSON text. ConfigError names an unknown key or a wrong value."""
    try:
        config = msgspec.json.decode(text or "{}", type=StructuredOutputsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"structured_outputs_config: {error}; got {text[:200]!r}") from error
    if config.reasoning_parser:
        log.warning("structured_outputs_config: reasoning_parser %r has no effect; --reasoning-parser of a server has",
                    config.reasoning_parser)
    if config.backend not in ("auto", "guidance", "llguidance"):
        log.warning("structured_outputs_config: backend %r was asked for; grammars are llguidance's", config.backend)
    return config
