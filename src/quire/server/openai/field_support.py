"""Names of parameters of OpenAI's and vLLM's that are no fields of the bodies, and whether they have an effect."""

from collections.abc import Mapping

from quire.server.api.bodies import OtherFields

# Not supported, with the values besides null that change nothing. A route may have one of them as a field of its own.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "echo": (False,),
    "function_call": ("none", "auto"),         # without functions
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),            # without tools, as the next four
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),           # without tools
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_special_tokens": (True,),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_options.continuous_usage_stats": (False,),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "vllm_xargs": ({},),
}

# Labels of the client or the request, hints on storage and padding, options of features that are refused.
WITHOUT_EFFECT = frozenset((
    "guided_decoding_backend", "request_id",
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "stream_options.include_obfuscation", "user",
))

OTHER_FIELDS = OtherFields(UNSUPPORTED, WITHOUT_EFFECT)
