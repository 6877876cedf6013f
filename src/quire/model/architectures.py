"""Architectures that config.json may name: those of Llama and its like, other families, encoders.

`FAMILIES` maps an architecture to the function of its family, which has the name of the model type: that counts where
no architecture is named. `ENCODER_ARCHITECTURES` has those of encoders, and whether a head is read; `REFUSED` reasons
for others.
"""

from collections.abc import Callable

from quire.model import llama
from quire.model.config_reader import ConfigReader
from quire.model.encoders.table import ENCODERS
from quire.model.families import table as families
from quire.model.spec import DecoderSpec

Family = Callable[[ConfigReader], DecoderSpec]

FAMILIES: dict[str, Family] = dict(sorted((llama.FAMILIES | families.FAMILIES).items()))
REFUSED = families.REFUSED
ENCODER_HEADS = {"Model": False, "ForMaskedLM": False, "ForSequenceClassification": True}  # whether a head is read
ENCODER_ARCHITECTURES = {
    name + end: (family, has_head) for name, family in ENCODERS.items() for end, has_head in ENCODER_HEADS.items()
}
MODEL_TYPES = {family.__name__: architecture for architecture, family in FAMILIES.items()} | {
    family.__name__: f"{name}Model" for name, family in ENCODERS.items()
}
