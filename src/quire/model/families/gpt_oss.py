"""gpt-oss: experts with biases and a clamped gate, attention sinks, windows in every second layer (OpenAI 2025)."""

from dataclasses import replace

from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.spec import (
    DOWN,
    GATE,
    MAX_EXPERTS,
    UP,
    DecoderSpec,
    ExpertNames,
    Experts,
    FeedForward,
    StackedTensor,
)

HEAD_DIM, DEFAULT_WINDOW, NORM_EPS, THETA = 64, 128, 1e-5, 150_000.0
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_IN, _OUT = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    sinks="self_attn.sinks",
    experts=ExpertNames(
        router="mlp.router",
        stacked=(
            StackedTensor(_IN, (f"{GATE}.weight", f"{UP}.weight"), is_transposed=True, is_interleaved=True),
            StackedTensor(_OUT, (f"{DOWN}.weight",), is_transposed=True),
            *(
                StackedTensor(f"{stem}_{end}", tuple(f"{module}.{end}" for module in modules), is_interleaved=True)
                for stem, modules in ((_IN, (GATE, UP)), (_OUT, (DOWN,)))
                for end in ("bias", "blocks", "scales")
            ),
        ),
    ),
)


def gpt_oss(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a gpt-oss."""
    config.reject("swiglu_alpha", 1.702, why="the gate's gain is 1.702")
    config.reject("swiglu_limit", 7, why="gates and ups are clamped at 7")
    config.reject("hidden_act", "silu", why="the gate is that of the family")
    config = config.with_default("head_dim", HEAD_DIM).with_default("attention_bias", True)
    config = config.with_default("rms_norm_eps", NORM_EPS).with_default("rope_theta", THETA)
    if not (config.has("rope_scaling") or config.has("rope_parameters")):
        config = config.replaced(rope_parameters=YARN)
    spec = llama(config, activation="clamped_silu_and_mul")
    num_experts = config.size("num_local_experts", 128, limit=MAX_EXPERTS)
    num_active = config.size("num_experts_per_tok", 4, limit=num_experts)
    expert = FeedForward(config.size("intermediate_size"), "clamped_silu_and_mul", has_bias=True)
    mixture = Experts(num_experts, num_active, expert, is_normalized=True, has_router_bias=True)
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW)
    spec = spec.with_windowed_layers(config.layer_types(spec.num_layers, windowed=1), window=window)
    spec = replace(spec, weights=WEIGHTS).with_attention(has_sinks=True)
    return spec.with_layers(lambda layer: replace(layer, feed_forward=mixture))
