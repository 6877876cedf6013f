"""Random parameters of a transformers model, on which every part of it matters."""

import torch


def randomize(model: torch.nn.Module) -> None:
    """Draw all parameters, none of them zero or one, from torch's global generator; weights keep activations' sizes.

    Biases of the choice of experts and factors of layers, which are buffers, are drawn as well.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                is_factor = name.endswith(("weight", "router.scale", "per_expert_scale"))
                parameter.copy_(0.3 * noise + (1.0 if is_factor else 0.0))
            else:
                parameter.copy_(noise * (0.5 if "emb" in name else 1.3 * parameter.shape[-1] ** -0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.3 * torch.randn_like(buffer) + 1.0)
