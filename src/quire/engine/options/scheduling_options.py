"""Options of scheduling: sizes and times of a step, the order of admission, and speculative decoding."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from quire.core.checks import shown
from quire.core.config import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    LARGE_CARD_BATCHED_TOKENS,
    Batching,
    SchedulingPolicy,
)
from quire.core.errors import ConfigError
from quire.core.options import MS, SIZE, option, parse_json_object, parse_ms
from quire.core.speculation import DEFAULT_DRAFTS, MAX_DRAFTS, SpeculationConfig, parse_speculation

HISTOGRAM_FAMILIES = (
    "request_latency", "time_to_first_token", "inter_token_latency", "iteration_tokens", "request_params_n",
    "request_num_preemptions", "request_tokens", "kv_cache_residency",
)  # fmt: skip
MAX_BUCKETS = 100              # most of a family: each is a series for every histogram and engine
_speculation = partial(option, panel="Speculation")
_scheduling = partial(option, panel="Scheduling")

MAX_NUM_SEQS = (1 << 16) - 1  # every row has room for max_model_len tokens; a GPU's grid has no more in y
_SMALL, _LARGE = DEFAULT_MAX_NUM_BATCHED_TOKENS, LARGE_CARD_BATCHED_TOKENS
DEFAULT_ITL_TARGET_MS = "500"  # a gap that a reader of a stream hardly notices


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SchedulingOptions:
    """Limits and policies of steps."""

    max_num_seqs: int | None = _scheduling(
        None, "sequences in one step", low=1, high=MAX_NUM_SEQS, flag_default=DEFAULT_MAX_NUM_SEQS,
        row=f"sequences in one step, at most {MAX_NUM_SEQS:,}; `None`: {DEFAULT_MAX_NUM_SEQS}",
    )  # fmt: skip
    max_num_batched_tokens: int | None = _scheduling(
        None, "tokens in one step", low=1, shown_default=f"{_SMALL:,}; {_LARGE:,} on a GPU of 70 GiB or more, but A100",
        row=f"tokens in one step; `None`: {_SMALL}, and {_LARGE} on a GPU of 70 GiB or more that is no A100. A prompt "
        "that needs more than half of it leaves the other half to other requests as far as they can use it, so short "
        "requests do not wait for long ones",
    )  # fmt: skip
    itl_target_ms: float | str | None = _scheduling(
        None, "longest step beside a running stream: prompts have shorter chunks; or none", metavar=MS,
        flag_default=DEFAULT_ITL_TARGET_MS,
        row="the longest that a step is planned to take while a sequence decodes, so the longest gap between tokens "
        "of a stream: prompts are computed in chunks that fit, by the times of the steps before "
        f"([below](#targets-of-time)). The default of commands is {DEFAULT_ITL_TARGET_MS}, but for `generate` and "
        "`run-batch`; `None`, or `none` on the command line: no limit but `max_num_batched_tokens`",
    )  # fmt: skip
    ttft_target_ms: float | str | None = _scheduling(
        None, "time to a first token for which long prompts are hurried; or none", metavar=MS, shown_default="none",
        row="the time from a request's arrival to its first token that prompts should meet: a long one that still can "
        "has a larger part of the steps, never past `itl_target_ms`, and at most half beside other long ones that came "
        "first ([below](#targets-of-time)); `None`, or `none`: prompts are not hurried",
    )  # fmt: skip
    scheduling_policy: SchedulingPolicy = _scheduling(
        "priority", "order of admission: by priority, by arrival (fcfs), or by the service of each client (fair)",
        row="order of admission: `priority` (the lowest first, then by arrival); `fcfs` (by arrival; a priority other "
        "than 0 is refused); `fair` (the client with the least service first; see "
        "[Scheduling policies](#scheduling-policies))",
    )  # fmt: skip
    enable_jump_forward: bool = _scheduling(
        True, "append tokens that a grammar forces without sampling them, and compute them as one chunk",
        row="`True`: a token that is the only one that a grammar allows is appended without sampling, and a run of "
        "them is computed as a chunk; the same tokens",
    )  # fmt: skip
    record: str | None = _scheduling(
        None, "folder for a record of all that is scheduled, for quire replay", metavar="FOLDER",
        row="folder for a record of all that is scheduled, which `quire replay` repeats ([below](#quire-replay)), with "
        "digests in place of tokens, salts and clients; `None`: none",
    )  # fmt: skip
    record_tokens: bool = _scheduling(
        False, "keep tokens and sampling parameters in the record",
        row="`True`: the record has the tokens and sampling parameters of requests",
    )  # fmt: skip
    record_bytes: int | str = _scheduling(
        "128MiB", "bound of the record of one engine, of which the latest part is kept", metavar=SIZE, low=1,
        row="bound of the record of one engine, of which the latest part is kept: bytes, or text as above",
    )  # fmt: skip
    fault_bytes: int | str = _scheduling(
        "4MiB", "memory for the latest plans, which are written to a file when a step fails; 0: none", metavar=SIZE,
        low=0,
        row="memory for the latest plans of one engine, which are written to a file of `fault_folder` when a step "
        "fails and `quire replay` shows: bytes, or text as above; 0: none. With `record` there are its files instead",
    )  # fmt: skip
    fault_folder: str | None = _scheduling(
        None, "folder for the latest plans before a fault", metavar="FOLDER",
        shown_default="quire-faults-UID where the system has temporary files",
        row="folder for the latest 16 of these files; `None`: `quire-faults-UID` where the system has temporary files",
    )  # fmt: skip
    custom_histogram_buckets: str = _scheduling(
        "", "bounds of histograms of /metrics, as JSON: families with lists of numbers", metavar="JSON",
        row="bounds of the buckets of histograms ([metrics.md](metrics.md#histograms)), by family, as a JSON object of "
        f"lists: `{'`, `'.join(HISTOGRAM_FAMILIES)}`. At most {MAX_BUCKETS} numbers above 0, each larger than the one "
        "before; of families that are left out the default",
    )  # fmt: skip
    batching: Batching = option(
        "continuous", "static: whole batches, one after the other; needs contiguous-max", kind="none",
        row="`continuous`; or `static`, with `contiguous-max`: as many as fit run as one batch until the last has "
        "ended, and all are answered then",
    )  # fmt: skip

    @property
    def resolved_max_num_seqs(self) -> int:
        """Sequences in one step, set or by default."""
        return self.max_num_seqs or DEFAULT_MAX_NUM_SEQS

    def batched_tokens(self, default: int = DEFAULT_MAX_NUM_BATCHED_TOKENS) -> int:
        """Return the tokens in one step: as set, or a device's default."""
        return self.max_num_batched_tokens or default

    @property
    def itl_target_s(self) -> float:
        """The longest time of a step with a decode, in seconds; infinity without a limit."""
        return math.inf if self.itl_target_ms is None else parse_ms(self.itl_target_ms, "itl_target_ms") / 1000

    @property
    def ttft_target_s(self) -> float:
        """The time to a first token for which prompts are hurried, in seconds; infinity without one."""
        return math.inf if self.ttft_target_ms is None else parse_ms(self.ttft_target_ms, "ttft_target_ms") / 1000

    @property
    def histogram_bounds(self) -> dict[str, list[float]]:
        """Bounds of buckets by family, where they are not the default. Raises ConfigError for others."""
        return _histogram_bounds(self.custom_histogram_buckets)

    def _check_histograms(self) -> None:
        _histogram_bounds(self.custom_histogram_buckets)


def _histogram_bounds(text: str) -> dict[str, list[float]]:
    name = "custom_histogram_buckets"
    found = parse_json_object(text, name)
    for family, bounds in found.items():
        if family not in HISTOGRAM_FAMILIES:
            raise ConfigError(f"{name} can have {', '.join(HISTOGRAM_FAMILIES)}, got {shown(family)}")
        numbers = bounds if isinstance(bounds, list) else []
        is_right = 0 < len(numbers) <= MAX_BUCKETS and all(
            isinstance(each, int | float) and not isinstance(each, bool) and 0 < each < math.inf for each in numbers
        )
        if not is_right or any(low >= high for low, high in pairwise(numbers)):
            raise ConfigError(
                f"{name}: {family} must be a list of 1 to {MAX_BUCKETS} numbers above 0, each larger than the one "
                f"before, got {shown(bounds)}"
            )
    return found


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SpeculationOptions:
    """Drafts, by one JSON object or by its keys."""

    speculative_config: str = _speculation(
        "", "speculative decoding, as JSON: method, model, num_speculative_tokens, ...", metavar="JSON",
        row="speculative decoding: a JSON object (in Python also a dict) with `method` (`ngram`, `suffix`, "
        f"`draft_model`, `mtp` or `eagle3`), `model`, `num_speculative_tokens` (1 to {MAX_DRAFTS}; {DEFAULT_DRAFTS}), "
        "`prompt_lookup_min` and `prompt_lookup_max`; the same tokens. Not with static batches, nor with a "
        "`memory_policy` other than `paged`",
    )  # fmt: skip
    spec_method: str | None = _speculation(
        None, "its method: ngram, suffix, draft_model, mtp or eagle3", metavar="METHOD",
        row="key `method` of `speculative_config`",
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
