"""KV cache dtypes: how keys and values are stored, by the names of --kv-cache-dtype. No torch.

`int8_per_token_head` and `fp8_per_token_head` (e4m3) keep a float32 scale for each token and KV head behind its
elements; `fp8` has one scale for a layer's keys and one for its values, which no block stores.
"""

from typing import Literal, NamedTuple

KVCacheDtype = Literal[
    "auto", "float32", "bfloat16", "float16", "int8_per_token_head", "fp8_per_token_head", "fp8"
]
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


class KVDtype(NamedTuple):
    """Dtype of the stored elements, and of one scale per token and KV head; names are torch's."""

    element: str
    scale: str | None = None  # None: no scales

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of a token's elements under one head."""
        return 0 if self.scale is None else ELEMENT_BYTES[self.scale]


QUANTIZED = {
    "int8_per_token_head": KVDtype("int8", "float32"),
    "fp8_per_token_head": KVDtype("float8_e4m3fn", "float32"),
    "fp8": KVDtype("float8_e4m3fn"),
}


def kv_dtype(name: str) -> KVDtype:
    """Return the storage of a name of --kv-cache-dtype other than auto."""
    return QUANTIZED.get(name) or KVDtype(name)
