"""Experts in GGUF files: the table of tensors with an entry for each expert, in place of one for all of a layer.

`blk.0.ffn_gate_exps.weight` [num_experts, rows, width] becomes `blk.0.ffn_gate.3.weight` [rows, width], as old files
have it. The gate of a shared expert, a vector in the file, becomes a matrix of one row.
"""

from quire.formats.gguf.file import MAX_TENSORS, GGUFFile, TensorEntry
from quire.model.spec import ExpertNames

MAX_ENTRIES = 4 * MAX_TENSORS
STACKED, SHARED_GATE = "_exps.weight", ".ffn_gate_inp_shexp.weight"
NAMES = ExpertNames(
    router="ffn_gate_inp", expert_in=("ffn_gate.{expert}", "ffn_up.{expert}"), expert_out="ffn_down.{expert}",
    shared_gate="ffn_gate_inp_shexp", shared_in=("ffn_gate_shexp", "ffn_up_shexp"), shared_out="ffn_down_shexp",
    stacked=(),
)  # fmt: skip


def with_single_experts(file: GGUFFile) -> dict[str, TensorEntry]:
    """Return the table with entries of single experts. ModelError for stacked tensors that are none, or too many."""
    found: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        if not name.endswith(STACKED):
            is_vector = name.endswith(SHARED_GATE) and len(entry.shape) == 1
            found[name] = entry._replace(shape=(1, *entry.shape)) if is_vector else entry
            continue
        stem, count, size = name.removesuffix(STACKED), entry.shape[0], entry.num_bytes // entry.shape[0]
        if len(entry.shape) != 3 or len(found) + count > MAX_ENTRIES:
            limit = f"expected [experts, rows, width], of at most {MAX_ENTRIES} tensors of experts in all"
            raise file.error(f"tensor {name!r} has shape {list(entry.shape)}, {limit}")
        for number in range(count):
            place = entry.offset + number * size
            found[f"{stem}.{number}.weight"] = TensorEntry(entry.type, entry.shape[1:], place, size)
    return found
