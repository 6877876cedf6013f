"""Back ends in PyTorch: TORCH, where the C++ kernels cannot serve, and REFERENCE, with the plainest attention."""

from dataclasses import replace
from functools import partial

import torch

from quire.kernels.back_end import BackEnd
from quire.kernels.reference import paged_attention as attention
from quire.kernels.reference.delta_net import delta_net, gate
from quire.kernels.reference.experts import TorchExperts
from quire.kernels.reference.kv_cache import PLAIN, copy_blocks, write_kv
from quire.kernels.reference.linear import TorchUp, embed, make_linear
from quire.kernels.reference.mamba import mamba
from quire.kernels.reference.norm import TorchNorm
from quire.kernels.reference.sampling import SAMPLING
from quire.kernels.reference.short_conv import short_conv
from quire.kernels.torch_arrays import TORCH_LIBRARY

TORCH = BackEnd(
    name="torch",
    library=TORCH_LIBRARY,
    linear=make_linear,
    head=partial(make_linear, dtype=torch.float32),
    low_rank_up=TorchUp,
    experts=TorchExperts,
    fuse=lambda program: program,
    cache_layout=PLAIN,
    paged_attention=attention.paged_attention,
    write_kv=write_kv,
    copy_blocks=copy_blocks,
    short_conv=short_conv,
    delta_net=delta_net,
    mamba=mamba,
    gate=gate,
    norm=TorchNorm,
    embed=embed,
    sampling=SAMPLING,
)
REFERENCE = replace(TORCH, name="reference", paged_attention=attention.reference)
