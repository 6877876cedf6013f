"""Encoders by the names of their architectures, less the ends that say what is read of a checkpoint."""

from collections.abc import Callable

from quire.model.config_reader import ConfigReader
from quire.model.encoders import bert, modernbert
from quire.model.spec import DecoderSpec

ENCODERS: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "Bert": bert.bert,
    "DistilBert": bert.distilbert,
    "ModernBert": modernbert.modernbert,
    "Roberta": bert.roberta,
    "XLMRoberta": bert.xlm_roberta,
}
