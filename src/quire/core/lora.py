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
MAX_SHOWN_NAMES = 64  # names of each kind in an AdapterUse


class Adapter(NamedTuple):
    """An adapter that an engine has read: the content of a folder, by its digest. `name`: what its request calls it."""

    digest: str
    folder: str
    name: str = ""


class AdapterUse(NamedTuple):
    """Adapters of the requests of an engine: how many, and the first MAX_SHOWN_NAMES of their names in order.

    Requests that were preempted or swapped out wait.
    """

    max_running: int  # max_loras; 0: adapters are off
    num_running: int
    num_waiting: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]


NO_ADAPTER_USE = AdapterUse(0, 0, 0, (), ())


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
