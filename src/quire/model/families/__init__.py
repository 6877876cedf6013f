"""Model families: a function each from config.json to a `DecoderSpec`, and the names of its tensors.

`FAMILIES` maps the architecture that config.json names to its function, which has the name of the model type: that
counts where no architecture is named. docs/adding-a-model.md walks through one.
"""

from collections.abc import Callable

from quire.model.config_reader import ConfigReader
from quire.model.families import gpt2, llama, opt
from quire.model.spec import DecoderSpec

FAMILIES: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "GPT2LMHeadModel": gpt2.gpt2,
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": llama.mistral,
    "OPTForCausalLM": opt.opt,
    "Qwen2ForCausalLM": llama.qwen2,
    "Qwen3ForCausalLM": llama.qwen3,
}
MODEL_TYPES = {family.__name__: architecture for architecture, family in FAMILIES.items()}
