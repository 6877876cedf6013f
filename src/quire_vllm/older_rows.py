"""Rows of arguments that versions of vLLM before 0.33 had, and scripts still have."""

from dataclasses import replace

from quire_vllm import values
from quire_vllm.translation_rows import Row, accepted, config, number, real, refused, renamed, same, switch, text, texts

_ENGINE = (
    same(
        real("swap_space"),
        "GiB, as in vLLM, for a number of at most 1024 without a unit; of an unlinked file in `--swap-dir`, or of host "
        "memory for a GPU; none by default on a CPU",
        values.swap_bytes,
    ),
    same(text("preemption_mode"), "`auto`, the default, too"),
    same(text("device")),
    *accepted(
        "on a CPU nothing is compiled or captured; on a GPU decodes are replayed as CUDA graphs, with the same tokens",
        number("max_seq_len_to_capture"), switch("full_cuda_graph"),
    ),
    replace(
        renamed(
            texts("cuda_graph_sizes"), "cudagraph_capture_sizes", "one number is `--max-cudagraph-capture-size`",
        ),
        spread=values.older_graph_sizes,
    ),
    *accepted(
        "steps are planned one by one, and on a GPU while one runs",
        number("num_scheduler_steps"), switch("multi_step_stream_outputs"), switch("disable_async_output_proc"),
        real("scheduler_delay_factor"), number("max_num_partial_prefills"), number("max_long_partial_prefills"),
        switch("use_v2_block_manager"), number("num_lookahead_slots"), switch("disable_hybrid_kv_cache"),
    ),
    *accepted("grammars have one back end; see `--structured-outputs-config`", text("guided_decoding_backend"),
              switch("guided_decoding_disable_fallback"), switch("enable_reasoning")),
    *(
        renamed(switch(f"guided_decoding_{option}"), "structured_outputs_config", f"its `{option}`",
                values.grammar_option(option))
        for option in ("disable_any_whitespace", "disable_additional_properties")
    ),
    *accepted("texts are tokenized in threads of the server", number("tokenizer_pool_size"),
              text("tokenizer_pool_type"), config("tokenizer_pool_extra_config")),
    *accepted("prompts are text: requests with images, audio or video are refused",
              switch("disable_mm_preprocessor_cache"), switch("enable_multimodal_encoder_data_parallel")),
    *accepted("the KV cache in 8 bits has scales of its own, or none", switch("calculate_kv_scales")),
    *accepted("adapters change linear layers alone", number("lora_extra_vocab_size"), number("max_prompt_adapters"),
              number("max_prompt_adapter_token")),
    *refused("adapters change linear layers alone", switch("enable_prompt_adapter")),
    *refused("adapters are named by `lora_request` or `--lora-modules`", text("qlora_adapter_name_or_path")),
    renamed(
        text("task"), "runner",
        "`embed`, `embedding` and `score` are `--runner pooling`; `classify` and `reward` are refused",
        values.runner_of,
    ),
    *refused("the model is pooled as its folder says", config("override_pooler_config")),
    *refused("the model is used as its folder says; change config.json in a copy", config("rope_scaling"),
             real("rope_theta"), text("override_attention_dtype")),
    *refused("the model runs on one device, in one process", switch("worker_use_ray"), switch("engine_use_ray")),
    *refused("no code from outside is run", text("logits_processor_pattern")),
    renamed(text("speculative_model"), "spec_model"),
    renamed(number("num_speculative_tokens"), "spec_tokens", convert=values.whole_number),
    *refused("devices are CPUs and NVIDIA GPUs", config("override_neuron_config")),
)
_SERVER = (
    *accepted("the log has one JSON line for each request, without prompt and output, and none for probes",
              switch("disable_log_requests")),
    *accepted("the engine has a process of its own", switch("disable_frontend_multiprocessing")),
)

OLDER_ROWS: tuple[Row, ...] = tuple(
    replace(row, is_current=False) for row in (*_ENGINE, *(replace(row, is_engine=False) for row in _SERVER))
)
