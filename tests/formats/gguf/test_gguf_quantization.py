"""Quantization of GGUF files: layers of modules that have several types."""

from quire.formats.gguf.gguf_weights import GGUFQuantization
from quire.model.quantization import WeightScheme
from quire_lab.sim.footprint import weight_bytes
from support.zero_model import spec_of


def test_modules_of_several_types_are_counted_each_by_its_own() -> None:
    """As in files that keep some tensors in more bits; what is fused of several is 8-bit integers, or dense."""
    spec = spec_of("Llama", hidden_size=256, head_dim=32, num_attention_heads=8, intermediate_size=512, vocab_size=512)
    int4, int8 = WeightScheme("int4", 32, 32, "minimums"), WeightScheme("int8", 32, 32)
    names = spec.weights
    query, key, value = names.qkv
    schemes = {f"{names.prefixes[0]}layers.0.{name}": int4 for name in (query, key, value, *names.feed_forward_in)}
    found = GGUFQuantization("gguf", int4, modules=schemes)
    assert found.scheme([f"model.layers.0.{query}"]) == int4
    assert found.scheme([f"model.layers.1.{query}"]) == WeightScheme()
    plain = weight_bytes(spec, "bfloat16")
    of_all = weight_bytes(spec, "bfloat16", quantization=found)
    mixed = GGUFQuantization("gguf", int4, modules=schemes | {f"model.layers.0.{value}": int8})
    assert mixed.scheme([f"model.layers.0.{name}" for name in names.qkv]) == WeightScheme("int8", 32, 32, "minimums")
    dense = GGUFQuantization("gguf", int4, modules=schemes | {f"model.layers.0.{value}": WeightScheme()})
    of_qkv = plain - weight_bytes(spec, "bfloat16", quantization=GGUFQuantization("gguf", int4, modules={
        name: scheme for name, scheme in schemes.items() if name.endswith(names.qkv)
    }))  # fmt: skip
    assert weight_bytes(spec, "bfloat16", quantization=dense) == of_all + of_qkv
    assert of_all < weight_bytes(spec, "bfloat16", quantization=mixed) < plain
