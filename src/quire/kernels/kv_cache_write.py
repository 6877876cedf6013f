"""Write the keys and values of a step's tokens into their slots of the paged cache."""

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store token t's key and value in slot `slot_mapping[t]`; -1 writes nothing.

    key and value [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim],
    contiguous; slot_mapping [num_tokens] int64, no slot twice. Kwon et al. 2023, section 5.1.
    """
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping.index_select(0, written)
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.index_select(0, written).to(cache.dtype))
