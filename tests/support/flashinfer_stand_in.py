"""Stand-in for the package flashinfer, which needs a card: its two wrappers, as far as Quire calls them, in PyTorch.

Attention is computed from what `plan` and `run` are given and from nothing else; the names and the order of arguments
are those of flashinfer-python 0.7.2. What the real kernels compute, and how fast, it does not show.
"""

import torch
from torch import Tensor


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.use_tensor_cores, self.plans = use_tensor_cores, 0

    def _keep(
        self, query_starts: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, sm_scale: float, window_left: int,
        logits_soft_cap: float | None, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        lists = query_starts, indptr, indices, last_page_len
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lists)
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert (indptr.diff() >= 1).all()
        self.plans += 1
        self._lists = tuple(x.clone() for x in lists)
        self._sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self._how = sm_scale, window_left, logits_soft_cap
        self._dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Attend; caches [num_pages, page_size, num_kv_heads, head_dim]."""
        starts, indptr, indices, last_page_len = self._lists
        num_heads, num_kv_heads, head_dim, page_size = self._sizes
        scale, window_left, softcap = self._how
        keys, values = paged_kv_cache
        assert q.shape == (starts[-1], num_heads, head_dim)
        assert (q.dtype, keys.dtype, values.dtype) == (self._dtypes[0], *[self._dtypes[1]] * 2)
        assert q.is_contiguous()
        assert keys.shape == values.shape == (len(keys), page_size, num_kv_heads, head_dim)
        out, group = torch.empty_like(q), num_heads // num_kv_heads
        for i in range(len(last_page_len)):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            length = (len(pages) - 1) * page_size + int(last_page_len[i])
            k, v = (x[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in (keys, values))
            own = q[starts[i] : starts[i + 1]].float()
            scores = torch.einsum("qhd,khd->hqk", own, k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            at = torch.arange(length - len(own), length)[:, None]
            is_seen = torch.arange(length) <= at
            if window_left >= 0:
                is_seen &= torch.arange(length) >= at - window_left
            v[~is_seen.any(0)] = 0  # the test's cache has NaN in tokens of a block that are behind every window
            weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
            out[starts[i] : starts[i + 1]] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query for each sequence."""

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, **how: object) -> None:
        """Keep the sequences of a step."""
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(starts, indptr, indices, last_page_len, *sizes, **how)  # type: ignore[arg-type]


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of queries, the last tokens of their sequences."""

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        *sizes: int, causal: bool = False, **how: object,
    ) -> None:  # fmt: skip
        """Keep the sequences of a step."""
        assert causal
        self._keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes, **how)  # type: ignore[arg-type]
