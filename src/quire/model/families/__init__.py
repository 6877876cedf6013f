"""Model families: one page each, a function from config.json to a `DecoderSpec` and the names of its tensors.

`FAMILIES` maps the architecture that config.json names to its page. docs/adding-a-model.md walks through one.
"""

from collections.abc import Callable

from quire.model.config_reader import ConfigReader
from quire.model.families import gpt2, llama, mistral, opt, qwen
from quire.model.spec import DecoderSpec

FAMILIES: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "GPT2LMHeadModel": gpt2.gpt2,
    "LlamaForCausalLM": llama.llama,
    "MistralForCausalLM": mistral.mistral,
    "OPTForCausalLM": opt.opt,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen3ForCausalLM": qwen.qwen3,
}

MODEL_TYPES: dict[str, str] = {  # for a config.json that names no architecture
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "opt": "OPTForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
