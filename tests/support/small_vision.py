"""Small models of images and text with random parameters, each a folder with tokenizer, template and processor."""

import json
from pathlib import Path

from tokenizers import AddedToken

from support.small_tokenizers import byte_level, save

IMAGE = "<image>"
NUM_TOKENS = 16     # tokens of an image
# LLaVA's: the images of a message come before its texts.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] | trim }}{% endfor %}"
    "{% endif %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "resample": 3, "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
GEMMA3_TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_GEMMA3_SPECIAL = (
    "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
)  # fmt: skip
_GEMMA3_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, "do_convert_rgb": None,
    "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True, "resample": 2,
    "rescale_factor": 1 / 255, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_seq_length": 4,
    "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
}  # fmt: skip
_GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "sliding_window": 64, "query_pre_attn_scalar": 16,
}  # fmt: skip
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 56, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_TEXT = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": 28, "patch_size": 7,
}  # fmt: skip


# Qwen-VL's: images and texts in their order.
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 4 * 28 * 28, "max_pixels": 12 * 28 * 28,
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711], "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
_QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 48, "patch_size": 14,
    "window_size": 56, "fullatt_block_indexes": [1],
}  # fmt: skip
_QWEN2_TEXT = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
_QWEN3_TEXT = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
_QWEN_TEXT = {
    "Qwen2VL": _QWEN2_TEXT, "Qwen2_5_VL": _QWEN2_TEXT, "Qwen3VL": _QWEN3_TEXT,
    "Qwen3VLMoe": _QWEN3_TEXT | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Qwen3_5": {
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    },
}  # fmt: skip


def write_qwen_vl(folder: Path, family: str, **changes: object) -> Path:
    """Write a Qwen-VL, 4 to 12 tokens an image, which needs transformers, into an empty folder.

    `family`: in transformers' names. `changes`: of the encoder's config.
    """
    import torch
    import transformers

    from support.random_parameters import randomize

    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _QWEN_SPECIAL])
    begin, end, image = (tokenizer.token_to_id(text) for text in _QWEN_SPECIAL[2:])
    torch.manual_seed(3)
    text = _TEXT | _QWEN_TEXT[family] | {"vocab_size": image + 1, "bos_token_id": 1, "eos_token_id": 2}
    del text["model_type"]
    vision = _QWEN_VISION | ({"num_position_embeddings": 25} if family.startswith("Qwen3") else {}) | changes
    make, settings = (getattr(transformers, family + end) for end in ("ForConditionalGeneration", "Config"))
    model = make(settings(
        text_config=text, vision_config=vision, image_token_id=image, vision_start_token_id=begin,
        vision_end_token_id=end,
    )).eval()  # fmt: skip
    randomize(model)
    model.save_pretrained(folder)
    save(tokenizer, folder, chat_template=QWEN_TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(_QWEN_PROCESSOR))
    return folder


# Pixtral's: images and texts in their order.
PIXTRAL_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% endif %}{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}[IMG]"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'user' %}[/INST]{% endif %}{% endfor %}"
)
_PIXTRAL_SPECIAL = ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
_PIXTRAL_PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 84}, "patch_size": 7,
    "processor_class": "PixtralProcessor", "do_pad": True,
}  # fmt: skip
_PIXTRAL_VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "patch_size": 7, "image_size": 84,
}  # fmt: skip


def write_mistral3(folder: Path, family: str = "Mistral3") -> Path:
    """Write a Mistral 3, a token for 14 x 14 pixels, or a Pixtral (Llava), one for 7 x 7, into an empty folder.

    It needs transformers. `family`: in transformers' names.
    """
    import torch
    import transformers

    from support.random_parameters import randomize

    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _PIXTRAL_SPECIAL])
    torch.manual_seed(3)
    text = _TEXT | {"model_type": "mistral", "vocab_size": tokenizer.get_vocab_size(), "head_dim": 8}
    image = tokenizer.token_to_id("[IMG]")
    own = {} if family == "Mistral3" else {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    make, settings = (getattr(transformers, family + end) for end in ("ForConditionalGeneration", "Config"))
    model = make(settings(
        text_config=text | {"sliding_window": None}, vision_config=_PIXTRAL_VISION, image_token_index=image, **own
    )).eval()  # fmt: skip
    randomize(model)
    model.save_pretrained(folder)
    save(tokenizer, folder, chat_template=PIXTRAL_TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PIXTRAL_PROCESSOR))
    return folder


def write_llava(folder: Path, num_positions: int = 512) -> Path:
    """Write the model, which needs transformers, into an empty folder."""
    import torch
    import transformers

    from support.random_parameters import randomize

    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    image_id = tokenizer.token_to_id(IMAGE)
    torch.manual_seed(3)
    text = _TEXT | {"vocab_size": image_id + 1, "max_position_embeddings": num_positions}
    config = transformers.LlavaConfig(text_config=text, vision_config=_CLIP, image_token_index=image_id)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    save(tokenizer, folder, chat_template=TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


_ONEVISION_SIZES = [[28, 28], [28, 56], [56, 28], [56, 56]]


def write_llava_onevision(folder: Path) -> Path:
    """Write a LLaVA-OneVision, 16 tokens a tile, which needs transformers, into an empty folder."""
    import torch
    import transformers

    from support.random_parameters import randomize

    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    image_id = tokenizer.token_to_id(IMAGE)
    torch.manual_seed(3)
    config = transformers.LlavaOnevisionConfig(
        text_config=_TEXT | {"model_type": "qwen2", "vocab_size": image_id + 1}, image_token_index=image_id,
        vision_config=_SIGLIP | {"image_size": 28, "patch_size": 7}, image_grid_pinpoints=_ONEVISION_SIZES,
    )  # fmt: skip
    model = transformers.LlavaOnevisionForConditionalGeneration(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    save(tokenizer, folder, chat_template=TEMPLATE)
    processor = {
        "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 28, "width": 28}, "do_pad": True,
        "image_grid_pinpoints": _ONEVISION_SIZES,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def write_gemma3(folder: Path) -> Path:
    """Write a Gemma 3, four tokens an image, which needs transformers, into an empty folder."""
    import torch
    import transformers

    from support.random_parameters import randomize

    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _GEMMA3_SPECIAL])
    begin, end, image = (tokenizer.token_to_id(text) for text in _GEMMA3_SPECIAL[2:])
    torch.manual_seed(3)
    config = transformers.Gemma3Config(
        text_config=_GEMMA3 | {"vocab_size": image + 1}, vision_config=_SIGLIP, mm_tokens_per_image=4,
        boi_token_index=begin, eoi_token_index=end, image_token_index=image,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    save(tokenizer, folder, chat_template=GEMMA3_TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = dict(zip(("boi_token", "eoi_token", "image_token"), _GEMMA3_SPECIAL[2:], strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named))
    (folder / "preprocessor_config.json").write_text(json.dumps(_GEMMA3_PROCESSOR))
    return folder
