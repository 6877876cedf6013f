"""Experts in GGUF files: the table of tensors with an entry for each expert, in place of one for all of a layer.

`blk.0.ffn_gate_exps.weight` [num_experts, rows, width] becomes `blk.0.ffn_gate.3.weight` [rows, width], as old files
have it. The gate of a shared expert, a vector in the file, becomes a matrix of one row.
"""

from quire.formats.gguf.gguf_file import MAX_TENSORS, GGUFFile, TensorEntry
from quire.model.spec import ExpertNames

MAX_ENTRIES = 4 * MAX_TENSORS
STACKED = {"_exps.weight": 3, "_exps.bias": 2}  # and their dimensions
SHARED_GATE = ".ffn_gate_inp_shexp.weight"
NAMES = ExpertNames(
    router="ffn_gate_inp", expert_in=("ffn_gate.{expert}", "ffn_up.{expert}"), expert_out="ffn_down.{expert}",
    shared_gate="ffn_gate_inp_shexp", shared_in=("ffn_gate_shexp", "ffn_up_shexp"), shared_out="ffn_down_shexp",
    stacked=(),
)  # fmt: skip


def with_single_experts(file: GGUFFile) -> dict[str, TensorEntry]:
    """Return the table with entries of single experts. ModelError for stacked tensors that are none, or too many."""
    found: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        ending = next((ending for ending in STACKED if name.endswith(ending)), None)
        if ending is None:
            is_vector = name.endswith(SHARED_GATE) and len(entry.shape) == 1
            found[name] = entry._replace(shape=(1, *entry.shape)) if is_vector else entry
            continue
        stem, count, size = name.removesuffix(ending), entry.shape[0], entry.num_bytes // entry.shape[0]
        if len(entry.shape) != STACKED[ending] or len(found) + count > MAX_ENTRIES:
            expected = "[experts, rows, width]" if STACKED[ending] == 3 else "[experts, rows]"
            limit = f"expected {expected}, of at most {MAX_ENTRIES} tensors of experts in all"
            raise file.error(f"tensor {name!r} has shape {list(entry.shape)}, {limit}")
        for number in range(count):
            place, part = entry.offset + number * size, ending.rpartition(".")[2]
            found[f"{stem}.{number}.{part}"] = TensorEntry(entry.type, entry.shape[1:], place, size)
    return found
