"""LoRA adapters in requests: the names that callers give, and the limits of an engine."""

from dataclasses import dataclass
from typing import NamedTuple

from quire.core.checks import check_int, check_text

DEFAULT_MAX_LORAS = 8
DEFAULT_MAX_RANK = 16
MAX_RANK = 512           # highest max_lora_rank
MAX_ADAPTERS = 4096      # highest max_loras and max_cpu_loras
MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096


class Adapter(NamedTuple):
    """An adapter that an engine has read: the content of a folder, by its digest."""

    digest: str
    folder: str


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for the requests of a call: a name, a number above 0, and a PEFT folder.

    The fields are those of vLLM. The adapter is the content of the folder: its name and number do not matter.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        check_text("lora_name", self.lora_name, MAX_NAME_CHARS)
        check_int("lora_int_id", self.lora_int_id, 1)
        check_text("lora_path", self.lora_path, MAX_PATH_CHARS)
