"""Write the keys and values of a step's tokens into their slots of the paged cache."""

from torch import Tensor

from quire.kernels.rotary import apply_rotary


def reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store token t's key and value in slot `slot_mapping[t]`; -1 writes nothing.

    key and value [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim],
    contiguous; slot_mapping [num_tokens] int64, no slot twice. Kwon et al. 2023, section 5.1.
    """
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache.flatten(0, 1)[slot] = key[token]
            value_cache.flatten(0, 1)[slot] = value[token]


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store what `reference` stores, all tokens at once."""
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping.index_select(0, written)
    for new, cache in ((key, key_cache), (value, value_cache)):
        rows = new.index_select(0, written).flatten(1).to(cache.dtype)
        cache.view(-1, rows.shape[1]).index_copy_(0, slots, rows)


def rotate_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Turn query and key by their positions, store key and value, return the query; arguments as in both ops.

    One op, so that a back end may do it in one pass. It may turn the query where it stands.
    """
    query, key = apply_rotary(query, key, positions, cos_sin)
    write_kv(key, value, key_cache, value_cache, slot_mapping)
    return query
