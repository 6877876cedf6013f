"""Code common to both ways of running transformers."""

import torch
import transformers
from protocol import Settings
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def load_model(settings: Settings) -> PreTrainedModel:
    torch.set_num_threads(settings.num_threads)
    chosen = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if settings.load_format == "dummy":
        config = AutoConfig.from_pretrained(settings.model, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, **chosen).eval()
    return AutoModelForCausalLM.from_pretrained(settings.model, local_files_only=True, **chosen).eval()


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}
