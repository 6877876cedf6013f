"""EngineSettings: the keyword arguments of `LLM` with their types, for type checkers and editors."""

from typing import Any, Literal, TypedDict


class VllmSettings(TypedDict, total=False):
    """Arguments of vLLM's LLM that set an option under another name here (docs/coming-from-vllm.md)."""

    num_gpu_blocks_override: int
    kv_cache_memory_bytes: int
    compilation_config: Any
    cuda_graph_sizes: list[int]
    convert: str
    task: str
    speculative_model: str
    num_speculative_tokens: int
    kv_transfer_config: Any
    guided_decoding_disable_any_whitespace: bool
    guided_decoding_disable_additional_properties: bool


class EngineSettings(VllmSettings, total=False):
    """Fields of EngineOptions that `LLM` passes on as they are; docs/reference.md has their meaning and defaults."""

    revision: str | None
    tokenizer_revision: str | None
    model_impl: Literal["auto", "quire", "transformers"]
    load_format: Literal["auto", "dummy"]
    mmproj: str | None
    skip_tokenizer_init: bool
    runner: Literal["auto", "generate", "pooling"]
    chat_template: str | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["none", "int8", "int4", "awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "gguf"] | None
    quantization_group_size: int
    quantization_activations: Literal["int8", "bfloat16"] | None
    packed_weights: str | None
    enable_sleep_mode: bool
    seed: int
    max_logprobs: int
    device: Literal["auto", "cpu", "cuda"]
    exact: bool | None
    attention_backend: Literal["auto", "triton", "cuda", "flashinfer"]
    cpu_isa: Literal["auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]
    capture_graphs: bool | None
    enforce_eager: bool
    early_launch: bool
    cudagraph_capture_sizes: tuple[int, ...]
    max_cudagraph_capture_size: int | None
    gpu_memory_utilization: float
    max_model_len: int | None
    kv_cache_dtype: Literal[
        "auto", "float32", "bfloat16", "float16", "int8_per_token_head", "fp8_per_token_head", "fp8"
    ]
    block_size: int
    kv_cache_memory: int | str | None
    num_kv_blocks: int | None
    num_state_slots: int | None
    swap_space: int | str | None
    num_swap_blocks: int | None
    kv_cache_metrics: bool
    kv_cache_metrics_sample: float
    preemption_mode: Literal["auto", "recompute", "swap"]
    enable_prefix_caching: bool
    kv_disk_size: int | str | None
    kv_disk_write_policy: Literal["reused", "finished", "all"]
    kv_disk_write_rate: int | str
    kv_events_config: str
    image_cache_memory: int | str
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
    memory_policy: Literal["paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle"]
    max_kv_share_per_key: float
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    itl_target_ms: float | str | None
    ttft_target_ms: float | str | None
    scheduling_policy: Literal["priority", "fcfs", "fair"]
    enable_jump_forward: bool
    batching: Literal["continuous", "static"]
    record: str | None
    record_tokens: bool
    record_bytes: int | str
    fault_bytes: int | str
    fault_folder: str | None
    custom_histogram_buckets: str
    spec_method: str | None
    spec_model: str | None
    spec_tokens: int | None
    enable_lora: bool
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int
    data_parallel_size: int
    prefill_engines: int
    prefill_least_tokens: int
    tensor_parallel_size: int
    tensor_parallel_mode: Literal["auto", "gather", "reduce"]
    distributed_executor_backend: Literal["auto", "mp", "uni", "ray"]
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    node_secret_file: str | None
    allow_public_master_addr: bool
    kv_role: Literal["none", "producer", "consumer", "both"]
    kv_engine_id: str | None
    kv_host: str
    kv_port: int
    kv_peers: str | None
    kv_secret_file: str | None
    kv_lease_duration: float
    stall_limit: float
    start_timeout: float
