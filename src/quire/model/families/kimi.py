"""Kimi Linear: Kimi Delta Attention in most layers, attention over latents in the others (Kimi Team 2025).

Kimi Delta Attention is a gated delta net with a decay of each row of the state; decays and gates are projected by way
of a width of one head. Nothing is rotated: the last dimensions of keys beside a latent are as they are projected.
"""

from dataclasses import replace

from quire.kernels.delta_net import MAX_TAPS
from quire.model.config_reader import MAX_HEAD_DIM, MAX_POSITIONS, ConfigReader
from quire.model.families.deepseek import LAYER_KINDS, latent_model
from quire.model.families.mixture import MIXTRAL_EXPERTS, with_later_experts
from quire.model.families.qwen3_next import MAX_STATE_HEADS, with_delta_nets
from quire.model.spec import MAX_EXPERTS, DecoderSpec, DeltaNet, Experts, FeedForward

MOE = "block_sparse_moe"
EXPERTS = replace(
    MIXTRAL_EXPERTS,
    router_bias=f"{MOE}.gate.e_score_correction_bias",
    shared_in=(f"{MOE}.shared_experts.gate_proj", f"{MOE}.shared_experts.up_proj"),
    shared_out=f"{MOE}.shared_experts.down_proj",
    stacked=(),
    stacked_names={},
)
DENSE_PARTS = tuple(f"{name}_proj.weight" for name in ("gate", "up", "down"))
MAX_POSITION = 1_048_576  # where a config names none


def kimi_linear(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Kimi Linear: three layers of four are Kimi Delta Attention, and nothing is rotated."""
    config.reject("mla_use_nope", True, why="its attention turns nothing")
    config.reject("hidden_act", "silu", why="the activation behind the convolution is silu")
    config.reject("num_nextn_predict_layers", 0, why="no checkpoint has layers that predict later tokens")
    for key in ("mla_use_output_gate", "attn_res_block_size", "routed_expert_hidden_size"):
        config.reject(key, False, why="what Kimi K3 adds is not computed")
    max_positions = config.size("model_max_length", MAX_POSITION, limit=MAX_POSITIONS)
    config = config.with_default("max_position_embeddings", max_positions).with_default("rms_norm_eps", 1e-5)
    spec = _with_delta_attention(config, latent_model(config, has_rotary=False))
    spec = with_later_experts(config, spec, _experts(config), 1, config.strings("mlp_layer_types", LAYER_KINDS))
    weights = replace(
        spec.weights,
        delta_in=tuple(f"self_attn.{name}_proj" for name in "qkv"),
        delta_rates=("self_attn.b_proj",),
        delta_gates=("self_attn.g_a_proj", "self_attn.g_b_proj"),
        delta_decays=("self_attn.f_a_proj", "self_attn.f_b_proj"),
        delta_conv=tuple(f"self_attn.{name}_conv1d" for name in "qkv"),
        delta_rate="self_attn.A_log",
        delta_rate_bias="self_attn.dt_bias",
        delta_norm="self_attn.o_norm",
        delta_out="self_attn.o_proj",
        experts=EXPERTS,
        renamed={f"{MOE}.{part}": f"mlp.{part}" for part in DENSE_PARTS},  # transformers 5 writes dense layers so
    )
    return replace(spec, weights=weights)


def _with_delta_attention(config: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with delta nets in the layers that `linear_attn_config` numbers, from 1, or `layer_types` names.

    transformers 5 writes the former's sizes as options of their own.
    """
    section = config.nested("linear_attn_config", config.section("linear_attn_config"))
    for key in ("gate_lower_bound", "use_full_rank_gate"):
        section.reject(key, False, why="what Kimi K3 adds is not computed")
    head_dim, num_heads, taps = (
        section.size(key, config.size(flat, default, limit=limit), limit=limit)
        for key, flat, default, limit in (
            ("head_dim", "linear_head_dim", 128, MAX_HEAD_DIM),
            ("num_heads", "linear_num_heads", 32, MAX_STATE_HEADS),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 4, MAX_TAPS),
        )
    )
    net = DeltaNet(num_heads, num_heads, head_dim, head_dim, taps, low_rank=head_dim)
    attending, others = (section.indices(key, spec.num_layers + 1) for key in ("full_attn_layers", "kda_layers"))
    numbers = sorted([*attending, *others])
    if not config.has("layer_types") and numbers != list(range(1, spec.num_layers + 1)):
        raise section.error(f"kda_layers and full_attn_layers together are not the layers from 1 to {spec.num_layers}")
    return with_delta_nets(config, spec, net, {number - 1 for number in attending})


def _experts(config: ConfigReader) -> Experts:
    config.choice("moe_router_activation_func", {"sigmoid": True}, "sigmoid")
    config.reject("moe_layer_freq", 1, why="every layer behind the dense ones has experts")
    num_experts, size = config.size("num_experts", limit=MAX_EXPERTS), config.size("moe_intermediate_size")
    num_shared, has_groups = config.size("num_shared_experts", 1, least=0), config.flag("use_grouped_topk", True)
    return Experts(
        num_experts=num_experts,
        num_active=config.size("num_experts_per_token", limit=num_experts),
        expert=FeedForward(size, "silu_and_mul"),
        is_normalized=config.flag("moe_renormalize", True),
        shared=FeedForward(num_shared * size, "silu_and_mul") if num_shared else None,
        is_shared_scored=False,
        is_sigmoid=True,
        has_choice_bias=True,
        factor=config.number("routed_scaling_factor", 1.0),
        num_groups=config.size("num_expert_group", 1, limit=num_experts) if has_groups else 1,
        num_kept_groups=config.size("topk_group", 1, limit=num_experts) if has_groups else 1,
    )
