"""Options of speculative decoding."""

from dataclasses import dataclass
from functools import partial

from quire.core.options import option
from quire.core.speculation import DEFAULT_DRAFTS, MAX_DRAFTS, SpeculationConfig, parse_speculation

_speculation = partial(option, panel="Speculation")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SpeculationOptions:
    """Drafts, by one JSON object or by its keys."""

    speculative_config: str = _speculation(
        "", "speculative decoding, as JSON: method, model, num_speculative_tokens, ...", metavar="JSON",
        row="speculative decoding: a JSON object (in Python also a dict) with `method` (`ngram`, `suffix` or "
        f"`draft_model`), `model`, `num_speculative_tokens` (1 to {MAX_DRAFTS}; {DEFAULT_DRAFTS}), `prompt_lookup_min` "
        "and `prompt_lookup_max`; the same tokens. Not with static batches, nor with a `memory_policy` other than "
        "`paged`",
    )  # fmt: skip
    spec_method: str | None = _speculation(
        None, "its method: ngram, suffix or draft_model", metavar="METHOD", row="key `method` of `speculative_config`"
    )
    spec_model: str | None = _speculation(
        None, "its draft model: folder, GGUF file or hub id", metavar="MODEL", row="key `model` of `speculative_config`"
    )
    spec_tokens: int | None = _speculation(
        None, "the most tokens of a draft", low=1, high=MAX_DRAFTS, shown_default=str(DEFAULT_DRAFTS),
        row="key `num_speculative_tokens` of `speculative_config`",
    )  # fmt: skip

    @property
    def speculation(self) -> SpeculationConfig | None:
        """The speculative decoding that is asked for, or None. Raises ConfigError for what is not supported."""
        return parse_speculation(self.speculative_config, self.spec_method, self.spec_model, self.spec_tokens)
