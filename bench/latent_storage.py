"""Errors of attention over latents in 8 bits: what each storage of a token adds to the numbers of a 16-bit cache.

    python bench/latent_storage.py

Random latents of 512 numbers beside 64 rotated ones, 16 heads over 1,024 tokens, in three shapes: all numbers alike;
latents with channels of other sizes (log-normal, sigma 1) and rotated pairs ten times as large as the others; the same
with rotated numbers of four times the size of latents. Scores have a standard deviation of 2. Printed is the RMS
difference of scores, and of results relative to their RMS, from float64 attention over the numbers in bfloat16.
"""

import numpy as np
import torch
from torch import Tensor

from quire.core.config import LATENT_SCALE_DIMS
from quire.kernels.reference.kv_cache import decode, encode

LATENT, ROPE, TOKENS, HEADS = 512, 64, 1024, 16
INT8, E4M3 = torch.int8, torch.float8_e4m3fn


def groups_of(x: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """Return numbers [tokens, count] as they come back from groups of `size` with a scale each."""
    parts = []
    for group in x.split(size, dim=-1):
        elements, scales = decode(encode(group, dtype, group.shape[-1] + 4), dtype, group.shape[-1])
        parts.append(elements * torch.as_tensor(scales)[:, None])
    return torch.cat(parts, dim=-1)


def rotated_apart(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same with the rotated numbers as they are."""
    return torch.cat([groups_of(x[:, :LATENT], dtype, LATENT_SCALE_DIMS), x[:, LATENT:]], dim=-1)


STORAGES = {
    "int8, one scale": lambda x: groups_of(x, INT8, LATENT + ROPE),
    "int8, one scale of each part": lambda x: torch.cat([groups_of(p, INT8, LATENT) for p in x.split(LATENT, -1)], -1),
    "int8, a scale of 128": lambda x: groups_of(x, INT8, LATENT_SCALE_DIMS),
    "int8, a scale of 128, rotated in 16 bits": lambda x: rotated_apart(x, INT8),
    "e4m3, no scales": lambda x: x.to(E4M3).float(),
    "e4m3, a scale of 128": lambda x: groups_of(x, E4M3, LATENT_SCALE_DIMS),
    "e4m3, a scale of 128, rotated in 16 bits": lambda x: rotated_apart(x, E4M3),
}


def tokens_of(shape: str, rng: np.random.Generator) -> Tensor:
    """Return keys [TOKENS, LATENT + ROPE] in bfloat16's numbers, float32."""
    latents, rotated = rng.standard_normal((TOKENS, LATENT)), rng.standard_normal((TOKENS, ROPE))
    if shape != "alike":
        latents *= rng.lognormal(sigma=1.0, size=LATENT)
        latents /= np.sqrt((latents**2).mean(-1, keepdims=True))  # as their norm leaves them
        rotated[:, ::ROPE // 4] *= 10
    if shape == "large rotated":
        rotated *= 4
    return torch.from_numpy(np.concatenate([latents, rotated], -1)).bfloat16().float()


def results(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [HEADS, TOKENS] and results [HEADS, LATENT], float64."""
    scores = query.double() @ keys.double().T
    return scores, scores.softmax(-1) @ keys[:, :LATENT].double()


def main() -> None:
    """Print a row for each shape and storage."""
    for shape in ("alike", "outliers", "large rotated"):
        rng = np.random.default_rng(0)
        keys = tokens_of(shape, rng)
        query = torch.from_numpy(rng.standard_normal((HEADS, LATENT + ROPE))).float()
        query *= 2 / results(query, keys)[0].std(-1, keepdim=True)
        scores, wanted = results(query, keys)
        for name, stored in STORAGES.items():
            other, found = results(query, stored(keys))
            error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
            print(f"{shape}, {name}: scores {(other - scores).square().mean().sqrt():.4f}, results {100 * error:.2f} %")


if __name__ == "__main__":
    main()
