"""Architectures that config.json may name: those of Llama and its like, other families, encoders.

`FAMILIES` maps an architecture to the function of its family, which has the name of the model type: that counts where
no architecture is named. `ENCODER_ARCHITECTURES` has those of encoders, and whether a head is read; `REFUSED` reasons
for others.
"""

from collections.abc import Callable

from quire.model import llama
from quire.model.config_reader import ConfigReader
from quire.model.families import (
    cohere,
    deepseek,
    encoders,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    kimi,
    lfm2,
    llama_variants,
    mamba,
    mixture,
    multimodal,
    olmo,
    opt,
    qwen3_next,
    qwen_vl,
)
from quire.model.spec import DecoderSpec

Family = Callable[[ConfigReader], DecoderSpec]

FAMILIES: dict[str, Family] = dict(sorted((llama.FAMILIES | {
    "BambaForCausalLM": mamba.bamba,
    "CohereForCausalLM": cohere.cohere,
    "Cohere2ForCausalLM": cohere.cohere2,
    "DeepseekV2ForCausalLM": deepseek.deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.deepseek_v3,
    "DeepseekV32ForCausalLM": deepseek.deepseek_v32,
    "Dots1ForCausalLM": mixture.dots1,
    "Ernie4_5_MoeForCausalLM": mixture.ernie4_5_moe,
    "FalconForCausalLM": falcon.falcon,
    "FalconH1ForCausalLM": mamba.falcon_h1,
    "GemmaForCausalLM": gemma.gemma,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3_text,
    "Gemma3ForConditionalGeneration": multimodal.gemma3,
    "Gemma4ForCausalLM": gemma.gemma4_text,
    "Gemma4ForConditionalGeneration": multimodal.gemma4,
    "Glm4ForCausalLM": llama_variants.glm4,
    "Glm4MoeForCausalLM": mixture.glm4_moe,
    "Glm4MoeLiteForCausalLM": deepseek.glm4_moe_lite,
    "GlmMoeDsaForCausalLM": deepseek.glm_moe_dsa,
    "GPT2LMHeadModel": gpt2.gpt2,
    "GPTJForCausalLM": gptj.gptj,
    "GPTNeoXForCausalLM": gpt_neox.gpt_neox,
    "GptOssForCausalLM": gpt_oss.gpt_oss,
    "GraniteForCausalLM": llama_variants.granite,
    "GraniteMoeHybridForCausalLM": mamba.granitemoehybrid,
    "KimiLinearForCausalLM": kimi.kimi_linear,
    "Lfm2ForCausalLM": lfm2.lfm2,
    "Lfm2MoeForCausalLM": lfm2.lfm2_moe,
    "LlavaForConditionalGeneration": multimodal.llava,
    "LlavaOnevisionForConditionalGeneration": multimodal.llava_onevision,
    "Mistral3ForConditionalGeneration": multimodal.mistral3,
    "Mistral4ForCausalLM": deepseek.mistral4,
    "NemotronHForCausalLM": mamba.nemotron_h,
    "OlmoForCausalLM": olmo.olmo,
    "MiniMaxM2ForCausalLM": mixture.minimax_m2,
    "MixtralForCausalLM": mixture.mixtral,
    "Olmo2ForCausalLM": olmo.olmo2,
    "Olmo3ForCausalLM": olmo.olmo3,
    "OlmoHybridForCausalLM": olmo.olmo_hybrid,
    "OlmoeForCausalLM": mixture.olmoe,
    "OPTForCausalLM": opt.opt,
    "Phi3ForCausalLM": llama_variants.phi3,
    "Qwen2_5_VLForConditionalGeneration": qwen_vl.qwen2_5_vl,
    "Qwen2VLForConditionalGeneration": qwen_vl.qwen2_vl,
    "Qwen2MoeForCausalLM": mixture.qwen2_moe,
    "Qwen3MoeForCausalLM": mixture.qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next.qwen3_next,
    "Qwen3VLForConditionalGeneration": qwen_vl.qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen_vl.qwen3_vl_moe,
    "Qwen3_5ForCausalLM": qwen3_next.qwen3_5_text,
    "Qwen3_5ForConditionalGeneration": qwen3_next.qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_next.qwen3_5_moe_text,
    "Qwen3_5MoeForConditionalGeneration": qwen3_next.qwen3_5_moe,
    "SmolLM3ForCausalLM": llama_variants.smollm3,
    "StableLmForCausalLM": llama_variants.stablelm,
}).items()))
ALIBI = "biases of attention scores by distance (ALiBi) are not computed"
COMPRESSED = "compressed attention and several residual streams are not computed"
RECURRENT = "of recurrent layers, gated delta nets and Mamba-2 are computed"
ENCODER = "of encoders, BERT, DistilBERT, RoBERTa, XLM-RoBERTa and ModernBERT are served"
EAGLE = "an EAGLE-3 head drafts for a model; give it with that, as model of speculative_config with the method eagle3"
REFUSED: dict[str, str] = {
    "BloomForCausalLM": ALIBI,
    "MptForCausalLM": ALIBI,
    "MPTForCausalLM": ALIBI,
    "Eagle3LlamaForCausalLM": EAGLE,
    "Eagle3Qwen3ForCausalLM": EAGLE,
    "Eagle3Speculator": EAGLE,
    "LlamaForCausalLMEagle3": EAGLE,
    "DeepseekV4ForCausalLM": COMPRESSED,
    "FalconMambaForCausalLM": RECURRENT,
    "JambaForCausalLM": RECURRENT,
    "MambaForCausalLM": RECURRENT,
    "Mamba2ForCausalLM": RECURRENT,
    "RecurrentGemmaForCausalLM": RECURRENT,
    "RwkvForCausalLM": RECURRENT,
    "T5ForConditionalGeneration": ENCODER,
}
ENCODERS: dict[str, Family] = {
    "Bert": encoders.bert,
    "DistilBert": encoders.distilbert,
    "ModernBert": encoders.modernbert,
    "Roberta": encoders.roberta,
    "XLMRoberta": encoders.xlm_roberta,
}
ENCODER_HEADS = {"Model": False, "ForMaskedLM": False, "ForSequenceClassification": True}  # whether a head is read
ENCODER_ARCHITECTURES = {
    name + end: (family, has_head) for name, family in ENCODERS.items() for end, has_head in ENCODER_HEADS.items()
}
MODEL_TYPES = {family.__name__: architecture for architecture, family in FAMILIES.items()} | {
    family.__name__: f"{name}Model" for name, family in ENCODERS.items()
}
