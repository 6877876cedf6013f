"""Architectures that config.json may name: those of Llama and its like, and of the rooms of families and encoders.

`FAMILIES` maps an architecture to the function of its family, which has the name of the model type: that counts where
no architecture is named. `ENCODER_ARCHITECTURES` has those of encoders, and whether a head is read; `REFUSED` reasons
for others; `ABSENT` the rooms that are not in this installation.
"""

from collections.abc import Callable

from quire.core.optional_package import absent_package
from quire.model import llama
from quire.model.config_reader import ConfigReader
from quire.model.spec import DecoderSpec

Family = Callable[[ConfigReader], DecoderSpec]

FAMILIES: dict[str, Family] = dict(llama.FAMILIES)
ENCODERS: dict[str, Family] = {}
ENCODER_HEADS = {"Model": False, "ForMaskedLM": False, "ForSequenceClassification": True}  # whether a head is read
REFUSED: dict[str, str] = {}
ABSENT: list[str] = []

try:
    from quire.model.families import table as families
except ModuleNotFoundError as error:
    if absent_package(error, "quire.model.families") is None:
        raise
    ABSENT.append("quire.model.families")
else:
    FAMILIES = dict(sorted((FAMILIES | families.FAMILIES).items()))
    REFUSED = families.REFUSED

try:
    from quire.model.encoders import table as encoders
except ModuleNotFoundError as error:
    if absent_package(error, "quire.model.encoders") is None:
        raise
    ABSENT.append("quire.model.encoders")
else:
    ENCODERS = encoders.ENCODERS

ENCODER_ARCHITECTURES = {
    name + end: (family, has_head) for name, family in ENCODERS.items() for end, has_head in ENCODER_HEADS.items()
}
MODEL_TYPES = {family.__name__: architecture for architecture, family in FAMILIES.items()} | {
    family.__name__: f"{name}Model" for name, family in ENCODERS.items()
}
