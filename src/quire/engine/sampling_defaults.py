"""SamplingDefaults: sampling parameters of the requests that leave them out."""

import msgspec


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Values of `SamplingParams`, by their names. `max_output_tokens` bounds every answer of a server."""

    params: dict[str, float | int | bool] = {}
    max_output_tokens: int | None = None


NO_DEFAULTS = SamplingDefaults()
