"""Rows of vLLM's arguments: those of servers alone, those of `EngineArgs` of vLLM 0.33, and those of older versions."""

from dataclasses import replace

from quire_vllm import values
from quire_vllm.values import (
    Row,
    accepted,
    config,
    number,
    real,
    refused,
    renamed,
    same,
    switch,
    text,
    texts,
)

_SERVERS = (
    same(text("host"), "127.0.0.1 by default; another one needs a key or `--allow-unauthenticated`"),
    same(number("port")),
    same(texts("api_key"), "repeatable, too"),
    same(text("uds"), "a file that a server left there is replaced"),
    same(text("root_path"), "requests with and without it are answered"),
    same(config("allowed_origins"), "none by default: else any web page could call a server on its reader's machine"),
    same(config("allowed_methods"), "repeatable, too"),
    same(config("allowed_headers"), "repeatable, too"),
    same(switch("allow_credentials"), "needs origins by name"),
    same(switch("enable_tokenizer_info_endpoint")),
    same(switch("enable_request_id_headers"), "without it `X-Request-Id` is the server's own"),
    same(text("config")),
    same(
        text("tool_call_parser"),
        "`auto`, the default, too: by the chat template ([tools](tools.md)); names of formats that have no parser here "
        "end the start with a list of those that have",
    ),
    same(switch("enable_auto_tool_choice"), "no effect: `tool_choice` `auto` is always served"),
    renamed(number("sse_keep_alive_interval"), "stream_keepalive", "15 seconds"),
    renamed(number("h11_max_header_count"), "max_headers", "100"),
    renamed(number("h11_max_incomplete_event_size"), "max_header_bytes", "32 KiB; bodies: `--max-body-bytes`"),
    *accepted("prompts and outputs are never logged", number("max_log_len"), switch("enable_log_deltas")),
    *refused("prompts and outputs are never logged", switch("enable_log_outputs")),
    renamed(
        switch("enable_log_requests"), "log_requests",
        "1, the default: a line for each request, without its texts; `--no-enable-log-requests`: 0", values.share_if,
    ),
    *accepted(
        "there is one line for each request and none for probes: see `--log-requests` and `--log-level`",
        text("uvicorn_log_level"), switch("disable_uvicorn_access_log"), text("disable_access_log_for_endpoints"),
    ),
    *accepted("errors of the server are always logged with their stack", switch("log_error_stack")),
    *accepted("usage always has prompt_tokens_details", switch("enable_prompt_tokens_details")),
    *accepted("requests are always counted: see `/metrics`", switch("enable_server_load_tracking")),
    *accepted("one process serves HTTP", number("api_server_count", flags=("-asc",)),
              number("data_parallel_supervisor_port"), real("dp_supervisor_probe_interval_s"),
              real("dp_supervisor_probe_timeout_s"), number("dp_supervisor_probe_failure_threshold")),
    *accepted("there is no chat route of Cohere's", switch("cohere_is_reasoning_model"), text("cohere_format")),
    *accepted("/docs is a page without scripts, and needs a key where keys are set", switch("disable_fastapi_docs"),
              switch("enable_offline_docs")),
    *accepted("requests have no images, audio or video", switch("trust_request_mm_kwargs"),
              switch("enable_flash_late_interaction")),
    *refused("the fingerprint is Quire's version", text("fingerprint_mode", "full", "hash"),
             text("fingerprint_value")),
    same(texts("lora_modules"), "repeatable, too"),
    *refused("no code from outside is run", texts("middleware"), text("tool_parser_plugin")),
    *refused("tools run at clients", text("tool_server")),
    *refused("set `strict` of each tool", text("tool_strict_level", "auto")),
    *refused("tools of a request are always given to the chat template", switch("exclude_tools_when_tool_choice_none")),
    same(config("default_chat_template_kwargs")),
    same(switch("enable_force_include_usage")),
    *accepted("a probe of the chat template finds the form of contents", text("chat_template_content_format")),
    *refused("chat templates of requests are never run", switch("trust_request_chat_template")),
    *refused("efforts of reasoning are given to the chat template as they are", config("reasoning_effort_map"),
             text("anthropic_disabled_thinking_effort", "auto")),
    *refused("answers are the assistant's", text("response_role", "assistant")),
    same(switch("return_tokens_as_token_ids")),
    same(switch("enable_per_request_metrics")),
    same(text("ssl_certfile"), "a file that cannot be used ends the start"),
    same(text("ssl_keyfile"), "not encrypted"),
    same(text("ssl_ca_certs")),
    same(number("ssl_cert_reqs")),
    same(text("ssl_ciphers")),
    *refused("start the server again when its certificate has changed", switch("enable_ssl_refresh")),
    *refused("only HTTP is served", number("grpc_port"), switch("grpc"), switch("headless"),
             switch("enable_scale_out")),
)

SERVER_ROWS: tuple[Row, ...] = tuple(replace(row, is_engine=False) for row in _SERVERS)


_SUPPORTED = (
    same(text("model"), "without a model, the bundled demo model; `--model M` and `M` are the same"),
    same(text("tokenizer")),
    same(text("chat_template"), "a file, or the template itself", lambda given, _shown: str(given)),
    same(text("dtype"), "`half` and `float` are `float16` and `float32`", values.dtype_of),
    same(
        number("max_model_len"),
        "the default is cut to what the KV cache holds, where vLLM refuses to start; with dynamic NTK scaling it is "
        "the original length, and only a longer one that is asked for scales the positions; -1 and `auto`: the default",
        values.length,
    ),
    same(number("block_size"), "8 to 128"),
    renamed(number("num_gpu_blocks_override"), "num_kv_blocks", convert=values.whole_number),
    renamed(
        number("kv_cache_memory_bytes"), "kv_cache_memory", "instead of `VLLM_CPU_KVCACHE_SPACE=4`, too: 4GiB",
        values.whole_number,
    ),
    same(
        text("kv_cache_dtype"),
        "`auto`, `int8_per_token_head`, `fp8_per_token_head` (`fp8_ds_mla`), `fp8` (`fp8_e4m3`); prefix caching stays "
        "on and exact ([quantization.md](quantization.md#kv-cache-in-8-bits))",
        values.kv_dtype_of,
    ),
    same(number("max_num_seqs"), "256", values.whole_number),
    same(
        number("max_num_batched_tokens"), "2048; 8192 on a GPU of 70 GiB or more that is no A100", values.whole_number
    ),
    same(number("seed")),
    same(
        number("data_parallel_size", flags=("-dp",)),
        "engines behind one server or `LLM`, which routes by their caches; memory and threads of the machine are "
        "divided among them ([scaling.md](scaling.md))",
    ),
    same(
        number("tensor_parallel_size", flags=("-tp",)),
        "processes of one machine that share each step: on CPUs with the same bits for any size "
        "([scaling.md](scaling.md)), on GPUs one for each ([gpu.md](gpu.md#several-gpus))",
        values.whole_number,
    ),
    same(
        number("nnodes", flags=("-n",)),
        "machines of a run with `--tensor-parallel-size`, each with as many processes, by hand or on Ray "
        "([scaling.md](scaling.md#several-machines-by-hand))",
    ),
    same(number("node_rank", flags=("-r",)), "nodes other than 0 need no `--headless`"),
    same(text("master_addr"), "beyond this machine it needs `--node-secret-file`"),
    same(number("master_port"), "29501"),
    same(
        text("distributed_executor_backend"),
        "`auto`, `mp`, `uni` with one process; `ray` places processes on a Ray cluster "
        "([scaling.md](scaling.md#ranks-on-a-ray-cluster)); `external_launcher` is refused",
    ),
    same(number("max_logprobs"), "20"),
    same(switch("enable_prefix_caching"), "on by default; matches go on inside of blocks, to the token"),
    same(
        text("scheduling_policy"),
        "`priority`, `fcfs`, `fair`; the default is `priority`, which is `fcfs` while no request has one; `fair` has "
        "no counterpart: equal service for each API key. A `priority` below 0 over HTTP needs `--operator-api-key` or "
        "`--allow-client-priority`",
    ),
    same(replace(real("gpu_memory_utilization"), flags=("--device-memory-utilization",)), "0.9"),
    same(
        text("quantization", flags=("-q",)),
        "`int8` and `int4` quantize float checkpoints while they are loaded; vLLM's names of formats (`awq`, `gptq`, "
        "`compressed-tensors`, `fp8`, `mxfp4`, `gguf`) only check what the checkpoint says "
        "([quantization](quantization.md))",
    ),
    same(switch("enable_sleep_mode"), "no `VLLM_SERVER_DEV_MODE`; `/wake_up` reads the weights of level 2 again"),
    same(switch("skip_tokenizer_init"), "`serve` needs it where the model has no tokenizer; `LLM` warns instead"),
    same(text("generation_config"), "a folder without the file ends the start"),
    same(config("override_generation_config"), "a value out of range ends the start; `eos_token_id` may be overridden"),
    same(texts("served_model_name"), "repeatable, too"),
    same(config("structured_outputs_config")),
    same(
        config("speculative_config", "-sc"),
        "`method` `ngram`, `suffix`, `draft_model`, `eagle3` or `mtp` (also by the names of families, as "
        "`qwen3_5_mtp`), with `model`, `num_speculative_tokens` (up to 16), `prompt_lookup_min` (2; in vLLM 5) and "
        "`prompt_lookup_max`; other methods and keys end the start; no token changes ([speculation](speculation.md))",
        values.json_text,
    ),
    same(text("spec_method"), "`ngram`, `suffix`, `draft_model`, `mtp` or `eagle3`"),
    same(text("spec_model")),
    same(number("spec_tokens"), "up to 16", values.whole_number),
    same(
        text("reasoning_parser"),
        "`auto`, the default, too: by the chat template ([tools](tools.md)); names of formats that have no parser here "
        "end the start with a list of those that have",
    ),
    same(config("reasoning_config"), "markers other than those of the format end the start"),
    renamed(number("max_num_queued_reqs"), "max_queued_requests", "1024; beyond it 429 with `Retry-After`"),
    renamed(number("max_num_queued_tokens"), "max_queued_tokens", "of prompts", values.whole_number),
    same(real("shutdown_timeout"), "30 seconds"),
)

_MODEL = (
    *accepted("no code of a model's folder is ever run", switch("trust_remote_code"), text("code_revision")),
    *accepted(
        "on a CPU nothing is compiled or captured; on a GPU decodes are replayed as CUDA graphs, with the same tokens",
        config("optimization_level", "-O"), text("performance_mode"), switch("cudagraph_metrics"),
        text("jit_monitor_mode"), switch("jit_monitor_verbose"),
    ),
    same(switch("enforce_eager"), "a CPU has no graphs"),
    same(
        texts("cudagraph_capture_sizes"),
        "of a GPU; up to 128 sizes from 1 to 8,192, of decodes and, above 8, of steps with chunks of prompts; those "
        "above `--max-num-batched-tokens` are left out; captured at start, or with `--no-capture-graphs` when "
        "steps need them ([gpu.md](gpu.md#graphs-of-steps))",
    ),
    same(
        number("max_cudagraph_capture_size"),
        "256, and 512 for steps with chunks of prompts; with `--cudagraph-capture-sizes` it is the largest of them",
        values.whole_number,
    ),
    replace(
        renamed(
            config("compilation_config", "-cc"), "cudagraph_capture_sizes",
            "nothing is compiled; its keys `cudagraph_capture_sizes` and `max_cudagraph_capture_size` are those flags, "
            "and `cudagraph_mode` `NONE` is `--enforce-eager`",
        ),
        spread=values.graph_options,
    ),
    *accepted(
        "kernels are chosen by the device, and on a CPU by `--cpu-isa`",
        config("attention_config", "-ac"), config("kernel_config"), config("ir_op_priority"),
        switch("enable_flashinfer_autotune"), switch("monokernel"), text("moe_backend"), text("linear_backend"),
        text("sparse_indexer_topk_backend"), switch("disable_cascade_attn"), text("gdn_prefill_backend"),
        text("kda_prefill_backend"), text("kda_decode_backend"),
    ),
    same(
        text("attention_backend"),
        "`auto`, `triton`, `cuda`, `flashinfer`; of vLLM's names `TRITON_ATTN` is `auto`, `FLASHINFER` `flashinfer` if "
        "that is installed, and the others have no effect",
        values.attention_backend_of,
    ),
    *accepted(
        "states of sequences are kept in float32, in slots of their own "
        "([prefix caching](prefix-caching.md#models-with-a-state))",
        text("mamba_backend"), text("mamba_ssu_algorithm"), switch("enable_mamba_cache_stochastic_rounding"),
        number("mamba_cache_philox_rounds"), text("mamba_cache_dtype"), text("mamba_ssm_cache_dtype"),
        number("mamba_block_size"), text("mamba_cache_mode"), switch("enable_mamba_shared_prefix_checkpoint"),
        config("mamba_config"), number("replayssm_buffer_len"), switch("use_replayssm"),
    ),
    *accepted("the attention of all layers is cached as the model says", switch("kv_sharing_fast_prefill"),
              switch("swa_bounded_replay")),
    *accepted("every format that is served is served", switch("allow_deprecated_quantization")),
    *refused("tokenizers are those of Hugging Face", text("tokenizer_mode", "auto", "hf", "slow")),
    *refused("configurations are those of Hugging Face, or in a GGUF file", text("config_format", "auto", "hf")),
    same(
        text("load_format"),
        "`dummy`: random weights of the shapes in a folder's config.json ([models](models.md#random-weights)); `hf`, "
        "`safetensors`, `gguf`, `fastsafetensors`, `runai_streamer` are `auto`, which reads safetensors or GGUF files "
        "as the model has them; others are refused",
        values.load_format_of,
    ),
    *accepted(
        "safetensors files are mapped into memory",
        text("safetensors_load_strategy"), number("safetensors_prefetch_num_threads"),
        number("safetensors_prefetch_block_size"), text("pt_load_map_location"), switch("use_tqdm_on_load"),
        texts("ignore_patterns"),
    ),
    *refused("there is no loader with settings", config("model_loader_extra_config")),
    same(
        text("model_impl"), "`vllm` is `quire`; `transformers` serves fewer models ([models](models.md))",
        values.model_impl_of,
    ),
    *refused("models run on Quire's own layers, or on those of transformers", config("model_class_overrides")),
    *refused(
        "the model is used as its folder says; change config.json in a copy",
        config("hf_overrides"), text("hf_config_path"), config("quantization_config"), text("model_weights"),
    ),
    same(text("revision")),
    same(text("tokenizer_revision"), "only with `--tokenizer`: the model's own tokenizer is of `--revision`"),
    *refused("the hub's cache is set by HF_HOME or HF_HUB_CACHE in the environment", text("download_dir")),
    *refused("the hub's token is that of HF_TOKEN in the environment, or of the hub's login",
             Row("hf_token", "optional text", (True,))),
    same(text("runner")),
    renamed(text("convert"), "runner", "`embed` is `--runner pooling`; `classify` is refused", values.runner_of),
    *refused("the model is pooled as its folder says", config("pooler_config")),
    *refused("windows of the model's layers are part of the model", switch("disable_sliding_window")),
    *refused("prompts are texts and token ids", switch("enable_prompt_embeds")),
    *refused("answers tell tokens and logprobs only", switch("enable_return_routed_experts"),
             switch("return_sampling_mask"), config("aux_output_config"), switch("enable_trace_replay")),
    *refused("logprobs are those of the model, before sampling parameters", text("logprobs_mode", "raw_logprobs")),
    *refused("random numbers of a seed are the same everywhere", switch("use_fp64_gumbel")),
    *refused("no code from outside is run", texts("logits_processors"), text("io_processor_plugin"),
             text("reasoning_parser_plugin"), text("scheduler_cls"), text("worker_cls", "auto"),
             text("worker_extension_cls")),
    *refused("drafts are counted for the whole engine", text("per_request_spec_decode_metrics", "none")),
    *refused("outputs have no watermarks", config("watermark_config")),
    *refused("there are no diffusion models", config("diffusion_config", "-dc")),
    *refused("there is no such memory", config("engram_config")),
    *accepted("it is for plug-ins, which there are none of", config("additional_config")),
)

_ADAPTERS = (
    same(switch("enable_lora")),
    same(number("max_loras"), "8, or `--max-cpu-loras` if that is lower"),
    same(number("max_lora_rank"), "any rank up to it"),
    same(number("max_cpu_loras")),
    *refused("prompts are text", config("default_mm_loras")),
    *refused("factors of all linear layers are applied", texts("lora_target_modules")),
    *refused("factors have the model's dtype", text("lora_dtype", "auto")),
    *accepted(
        "the kernels of adapters have no such settings",
        switch("fully_sharded_loras"), switch("enable_tower_connector_lora"), switch("specialize_active_lora"),
        switch("enable_mixed_moe_lora_format"), switch("enable_moe_shared_loras"), number("max_lora_cls_labels"),
    ),
)

_MEDIA = (
    same(
        texts("allowed_media_domains"),
        "none by default, and then none is fetched; exact names, https, public addresses, no redirects",
    ),
    same(config("mm_processor_kwargs"), "`min_pixels` and `max_pixels` alone"),
    renamed(config("limit_mm_per_prompt"), "max_images", "its `image`; 8 by default", values.max_images_of),
    *accepted(
        "images are read as the model's files say; audio and video are refused",
        text("allowed_local_media_path"), switch("language_model_only"), config("media_io_kwargs"),
        real("mm_processor_cache_gb"), text("mm_processor_cache_type"), text("mm_hasher_algorithm"),
        number("mm_shm_cache_max_object_size_mb"), text("mm_encoder_tp_mode"), text("mm_encoder_attn_backend"),
        text("mm_encoder_attn_dtype"), text("mm_encoder_fp8_scale_path"), text("mm_encoder_fp8_scale_save_path"),
        real("mm_encoder_fp8_scale_save_margin"), switch("interleave_mm_strings"), switch("skip_mm_profiling"),
        real("video_pruning_rate"), text("video_pruning_method"), text("mm_tensor_ipc"), text("mm_processor_device"),
        real("mm_ipc_gpu_memory_gb"), switch("mm_device_do_normalize"), switch("disable_chunked_mm_input"),
        number("renderer_num_workers"), switch("enable_mm_processor_stats"), config("ec_manager_config"),
    ),
    *refused("prompts are text", switch("enable_mm_embeds"), switch("mm_encoder_only"), config("ec_transfer_config")),
)

_DEVICES = (
    *refused(
        "the model runs on one device, in one process",
        number("pipeline_parallel_size", 1, flags=("-pp",)),
        number("decode_context_parallel_size", 1, flags=("-dcp",)),
        number("prefill_context_parallel_size", 1, flags=("-pcp",)), number("data_parallel_rank", 0, flags=("-dpn",)),
        number("data_parallel_start_rank", 0, flags=("-dpr",)), number("data_parallel_size_local", 1, flags=("-dpl",)),
        switch("data_parallel_hybrid_lb", "-dph"), switch("data_parallel_external_lb", "-dpe"),
        switch("data_parallel_multi_port_external_lb", "-dpm"), switch("enable_elastic_ep"),
    ),
    *accepted(
        "the model runs on one device, in one process",
        number("distributed_timeout_seconds"),
        number("cpu_distributed_timeout_seconds"), text("data_parallel_address", flags=("-dpa",)),
        number("data_parallel_rpc_port", flags=("-dpp",)), text("data_parallel_backend", flags=("-dpb",)),
        text("dcp_comm_backend"), switch("dcp_q_replicate"), number("dcp_kv_cache_interleave_size"),
        number("cp_kv_cache_interleave_size"), number("dp_sync_interval"), number("elastic_ep_max_dp_size"),
        switch("disable_nccl_for_dp_synchronization"), switch("disable_custom_all_reduce"),
        switch("enable_shm_tensor_arena"), switch("enable_batch_sharded_sampling"), switch("enable_hc_sp"),
        number("max_parallel_loading_workers"), switch("ray_workers_use_nsight"), switch("enable_nccl_comm_suspend"),
        switch("enable_dbo"), number("ubatch_size"), number("dbo_decode_token_threshold"),
        number("dbo_prefill_token_threshold"), switch("aggregate_engine_logging"),
    ),
    *accepted(
        "all experts are on one device",
        switch("enable_expert_parallel", "-ep"), switch("enable_ep_weight_filter"), text("all2all_backend"),
        switch("enable_eplb"), config("eplb_config"), text("expert_placement_strategy"),
    ),
    *refused("start the command under numactl", switch("numa_bind"), texts("numa_bind_nodes"), texts("numa_bind_cpus")),
    *refused("set CUDA_VISIBLE_DEVICES in the environment", text("device_ids")),
    *refused("see `--restart-engine`", switch("enable_fault_tolerance"), config("fault_tolerance_config")),
)

_CACHE = (
    same(text("prefix_caching_hash_algo"), "names blocks in KV events alone, by SHA-256; the cache compares tokens"),
    same(
        config("kv_events_config"),
        "the messages of vLLM 0.33, block hashes included ([scaling](scaling.md#kv-events)); without an `endpoint` "
        "127.0.0.1 is bound, not all interfaces; inproc:// ends the start",
        values.kv_events_json,
    ),
    *accepted("prefixes are matched to the token, states at ends of blocks, and kept until their room is needed",
              number("prefix_match_unit")),
    *accepted("states are kept at the last full block of prompts and of answers, and where prompts part, as with 0 in "
              "vLLM; none every so many tokens", number("prefix_cache_retention_interval")),
    *accepted("layers with a window give back the blocks behind it, in one cache",
              switch("disable_hybrid_kv_cache_manager")),
    *accepted("room is kept by the tokens that running requests will need", real("watermark"),
              switch("scheduler_reserve_full_isl")),
    same(switch("kv_cache_metrics")), same(real("kv_cache_metrics_sample")),
    *refused("the KV cache has one dtype", texts("kv_cache_dtype_skip_layers")),
    *refused("weights are on one device; `--swap-space` is for the KV cache", real("cpu_offload_gb", 0),
             number("offload_group_size", 0)),
    *accepted("weights are on one device", text("offload_backend"), texts("cpu_offload_params"),
              number("offload_num_in_group"), number("offload_prefetch_step"), texts("offload_params")),
    *refused("keep blocks on a disk by `--kv-disk-dir` and `--kv-disk-size`; on a CPU, host memory is the KV cache's "
             "own: `--kv-cache-memory`", real("kv_offloading_size", 0)),
    replace(
        config("kv_transfer_config"), does="renamed", own="kv_role",
        sentence="of `NixlConnector`: `kv_role`, `kv_port`, `kv_ip`, `engine_id` and `kv_lease_duration`, beside "
        "`--kv-peers` and `--kv-secret-file` ([scaling](scaling.md#prefill-apart-from-decoding)); other connectors end "
        "the start, and `kv_load_failure_policy` is `recompute`",
        spread=values.transfer_options,
    ),
    *accepted("preempted requests are swapped to `--swap-space`", text("kv_offloading_backend")),
    *accepted("what sleeps is freed, and loaded again", text("sleep_mode_backend"),
              switch("sleep_mode_offload_cudagraph"), texts("sleep_preserve_parameter_names"),
              switch("enable_cumem_allocator")),
    *refused("weights are those of the start", config("weight_transfer_config")),
)

_STEPS = (
    *accepted(
        "prompts are always computed in chunks, within the token budget of a step, half of which remains for other "
        "requests while one prompt is long",
        switch("enable_chunked_prefill"), number("long_prefill_token_threshold"),
        switch("long_prefill_token_threshold_adaptive"), number("prefill_schedule_interval"),
    ),
    *refused("the token budget of a step is `--max-num-batched-tokens`", number("max_num_scheduled_tokens")),
    *refused("sequences of a step are bounded by `--max-num-seqs`", number("max_num_active_seqs")),
    *accepted("on a GPU the next step is always planned while one runs", switch("async_scheduling")),
    *accepted("tokens are sent as soon as their step ends", number("stream_interval")),
)

_OPERATION = (
    *accepted("nothing is logged periodically: see `/metrics`", switch("disable_log_stats"),
              switch("enable_logging_iteration_details")),
    same(text("log_level"), "in capitals, too", values.level_name),
    *accepted("no metric is hidden", text("show_hidden_metrics_for_version")),
    *refused("the log is set by `--log-level`, `--log-format`, `--log-file` and `--log-requests`",
             config("logging_config"), text("log_config_file")),
    same(
        text("otlp_traces_endpoint"),
        "by OTLP/HTTP, not gRPC: most collectors have it at port 4318 ([traces](metrics.md#traces))",
    ),
    *accepted("a trace always has a span of each stage of a request", texts("collect_detailed_traces")),
    renamed(
        config("profiler_config"), "profile_dir",
        "its `torch_profiler_dir`: Quire's own profiles, of ops and stacks ([reference](reference.md#profiles))",
        values.profile_dir_of,
    ),
    *refused("profiles are those of `/start_profile`", switch("enable_layerwise_nvtx_tracing")),
    same(config("custom_histogram_buckets"), "", values.json_text),
    *refused("metrics are those of metrics.md", switch("enable_mfu_metrics")),
    *refused("a stalled engine is found by `--stall-limit`, which logs all stacks", config("watchdog_config")),
    *accepted("the environment has no settings but those of flags", switch("fail_on_environ_validation")),
    *refused("all routes are served", switch("tokens_only")),
)

ENGINE_ROWS = (
    *_SUPPORTED, *_MODEL, *_ADAPTERS, *_MEDIA, *_DEVICES, *_CACHE, *_STEPS, *_OPERATION,
)  # fmt: skip


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
    *accepted("images are read as the model's files say; audio and video are refused",
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
    *refused("a flag of SGLang: keep blocks on a disk by `--kv-disk-dir`, `--kv-disk-size`, `--kv-disk-write-policy`",
             switch("enable_hierarchical_cache"), real("hicache_ratio"), real("hicache_size"),
             text("hicache_write_policy"), text("hicache_storage_backend"), text("hicache_storage_prefetch_policy")),
    *refused("what is dropped depends on the request, so no block could be shared, stored or restored "
             "(docs/related-work.md); a cache of 8 bits takes half the memory: `--kv-cache-dtype int8_per_token_head`",
             text("kv_compression")),
)
_SERVER = (
    renamed(switch("disable_log_requests"), "log_requests", "0", values.share_unless),
    *accepted("the engine has a process of its own", switch("disable_frontend_multiprocessing")),
)

OLDER_ROWS: tuple[Row, ...] = tuple(
    replace(row, is_current=False) for row in (*_ENGINE, *(replace(row, is_engine=False) for row in _SERVER))
)
