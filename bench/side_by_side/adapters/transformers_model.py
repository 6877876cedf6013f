"""Code common to both ways of running transformers."""

import torch
import transformers
from protocol import Settings
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_model(settings: Settings) -> PreTrainedModel:
    torch.set_num_threads(settings.num_threads)
    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval()


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}
