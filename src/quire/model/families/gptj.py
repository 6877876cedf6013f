"""GPT-J: parallel sublayers behind one norm, interleaved rotary embeddings (Wang and Komatsuzaki 2021)."""

from dataclasses import replace

from quire.model.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.model.families.gpt2 import WEIGHTS as GPT2_WEIGHTS
from quire.model.rope import DEFAULT_THETA
from quire.model.spec import ACTIVATIONS, Attention, DecoderSpec, FeedForward, LayerSpec, Rotary

ROTARY_DIM = 64
WEIGHTS = replace(
    GPT2_WEIGHTS,
    positions=None,
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attention_out="attn.out_proj",
    feed_forward_norm=None,
    feed_forward_in=("mlp.fc_in",),
    feed_forward_out="mlp.fc_out",
    is_transposed=False,
)


def gptj(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a GPT-J."""
    num_heads, hidden_size = config.size("n_head"), config.size("n_embd")
    length = config.size("n_positions", limit=MAX_POSITIONS)
    layer = LayerSpec(
        mixer=Attention(num_heads, num_heads, config.divided("n_embd", num_heads)),
        feed_forward=FeedForward(
            size=config.size("n_inner", 4 * hidden_size),
            activation=config.choice("activation_function", ACTIVATIONS, default="gelu_new"),
            has_bias=True,
        ),
        is_parallel=True,
    )
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.size("n_layer", limit=MAX_LAYERS),
        max_position_embeddings=length,
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        rotary=Rotary(config.size("rotary_dim", ROTARY_DIM), DEFAULT_THETA, length, is_interleaved=True),
        is_head_tied=config.flag("tie_word_embeddings", False),
        has_head_bias=True,
        weights=WEIGHTS,
    )
