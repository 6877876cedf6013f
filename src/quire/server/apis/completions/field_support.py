"""Names of parameters of OpenAI's and vLLM's that are no fields of the bodies, and whether they have an effect."""

from collections.abc import Mapping

from quire.server.api.bodies import OtherFields

# Not supported, with the values besides null that change nothing. A route may have one of them as a field of its own.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),         # without functions
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),            # without tools, as the next four
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": (),
    "tool_choice": ("none", "auto"),           # without tools
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ([],),
    "return_weight_versions": (False,),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),            # no limit
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

# Labels of the client or the request, hints on storage and prices, padding and the size of chunks, options of features
# that are refused, and of routes and models that Quire does not have.
WITHOUT_EFFECT = frozenset((
    "guided_decoding_backend", "request_id", "session_id", "stream_interval", "return_token_offsets",
    "routed_experts_prompt_start", "mm_payload", "return_mm_kwargs",
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "service_tier", "stream_options.include_obfuscation", "user",
))

OTHER_FIELDS = OtherFields(UNSUPPORTED, WITHOUT_EFFECT)
