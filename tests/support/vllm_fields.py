"""Names of the fields of vLLM 0.33's requests and responses, recorded from its models."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BOTH = _names("""
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words
    add_special_tokens response_format structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids return_weight_versions routed_experts_prompt_start return_token_offsets mm_payload
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval echo
""")
COMPLETION_REQUEST = _BOTH | _names("prompt suffix prompt_embeds")
CHAT_REQUEST = _BOTH | _names("""
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text
""")

COMPLETION = _names("""
    id object created model choices service_tier system_fingerprint usage kv_transfer_params ec_transfer_params metrics
""")
COMPLETION_CHOICE = _names("""
    index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts
    weight_versions
""")
COMPLETION_CHUNK_CHOICE = COMPLETION_CHOICE - {"prompt_logprobs", "routed_experts"}
CHAT = COMPLETION | {"prompt_logprobs", "prompt_token_ids", "prompt_text"}
MESSAGE = _names("role content refusal annotations audio function_call reasoning")  # without tool_calls
CHAT_CHOICE = _names("""
    index message logprobs finish_reason stop_reason token_ids routed_experts weight_versions
""")
CHAT_CHUNK_CHOICE = _names("index delta logprobs finish_reason token_ids")          # results of all but the last
LAST_CHAT_CHUNK_CHOICE = CHAT_CHUNK_CHOICE | {"stop_reason", "weight_versions"}
USAGE = _names("prompt_tokens completion_tokens total_tokens prompt_tokens_details completion_tokens_details")
PROMPT_USAGE = _names("cached_tokens created_cache_tokens multimodal_tokens")
MODEL = _names("id object created owned_by root parent max_model_len permission")
PERMISSION = _names("""
    id object created allow_create_engine allow_sampling allow_logprobs allow_search_indices allow_view
    allow_fine_tuning organization group is_blocking
""")
