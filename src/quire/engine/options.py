"""EngineOptions: every setting of an engine under its public name, checked before anything is loaded."""

import math
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

from quire.core.checks import shown
from quire.core.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    KERNEL_BLOCK_SIZES,
    Batching,
    MemoryPolicy,
    PreemptionMode,
    SchedulingPolicy,
)
from quire.core.errors import ConfigError
from quire.core.kv_dtypes import KVCacheDtype
from quire.core.lora import DEFAULT_MAX_LORAS, DEFAULT_MAX_RANK, MAX_ADAPTERS, MAX_RANK
from quire.core.options import MS, SIZE, check_options, option, parse_bytes, parse_json_object, parse_ms
from quire.core.pooling import Runner
from quire.core.speculation import DEFAULT_DRAFTS, MAX_DRAFTS, SpeculationConfig, parse_speculation
from quire.model.quantization import (
    DEFAULT_GROUP_SIZE,
    WHOLE_ROW,
    Activations,
    Method,
    QuantizationOptions,
)
from quire.model.resolve import HUB_FILES, TOKENIZER_FILES
from quire.model.sharding import Mode
from quire.text.text_settings import given_chat_template

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
ExecutorBackend = Literal["auto", "mp", "uni", "ray"]
AttentionBackEndName = Literal["auto", "triton", "cuda", "flashinfer"]
TensorParallelMode = Literal["auto", "gather", "reduce"]
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "quire", "transformers"]
CpuIsa = Literal["auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]
OVERRIDE = "override_generation_config"
MAX_ENGINES = 64
START_TIMEOUT_S = 120.0
MAX_NUM_SEQS = (1 << 16) - 1  # every row has room for max_model_len tokens; a GPU's grid has no more in y
DEFAULT_ITL_TARGET_MS = "500"  # a gap that a reader of a stream hardly notices
MAX_GRAPH_SIZES, MAX_GRAPH_TOKENS = 128, 8192  # a graph keeps up to a few MiB, beside what the largest step needs

_engine = partial(option, panel="Engine")


def parse_sizes(texts: list[str]) -> tuple[int, ...]:
    """Return the sizes of a repeatable flag. Raises ConfigError for what is no integer."""
    try:
        return tuple(map(int, texts))
    except ValueError as error:
        raise ConfigError(f"cudagraph_capture_sizes must be integers: {error}") from None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine; None means that the engine chooses. Options of kind "none" have no flag here."""

    model: str | None = option(
        None, "folder, GGUF file or hub id", kind="argument", metavar="MODEL", shown_default="the bundled demo model",
        row="folder in Hugging Face format, GGUF file ([quantization.md](quantization.md#gguf-files)), or hub id; "
        "`None` is the bundled demo model",
    )  # fmt: skip
    _: KW_ONLY
    tokenizer: str | None = _engine(
        None, "of another model: folder, GGUF file or hub id", metavar="MODEL", shown_default="the model's own",
        row="folder, GGUF file or hub id with the tokenizer and the chat template; `None`: the model's own. For GGUF "
        "files with a vocabulary that is not read",
    )  # fmt: skip
    revision: str | None = _engine(
        None, "branch, tag or commit of the model's hub id", metavar="NAME", shown_default="the default branch",
        row="branch, tag or commit of a hub id; `None`: the default branch. Folders and files have none",
    )  # fmt: skip
    tokenizer_revision: str | None = _engine(
        None, "branch, tag or commit of the tokenizer's hub id", metavar="NAME", shown_default="the default branch",
        row="the same of the hub id that `tokenizer` names; the model's own tokenizer is of `revision`",
    )  # fmt: skip
    model_impl: ModelImpl = _engine(
        "auto", "layers of the model: Quire's own, transformers' on Quire's cache, or auto: its own where it has them",
        row="layers of the model: `quire`, its own; `transformers`, those of the transformers library on Quire's cache "
        "([models.md](models.md#through-transformers)); `auto`, its own where it has them",
    )  # fmt: skip
    load_format: LoadFormat = _engine(
        "auto", "weights: those of the model's files, or dummy: random ones of the shapes in config.json, for "
        "measurements without weights",
        row="weights: `auto`, those of the model's files; `dummy`, random ones of the shapes in a folder's "
        "`config.json`, for measurements ([models.md](models.md#random-weights)): answers mean nothing, and weights "
        "are neither read nor downloaded. A draft model has them, too",
    )  # fmt: skip
    skip_tokenizer_init: bool = _engine(
        False, "load no tokenizer: prompts are token ids, and answers have no text",
        row="`True`: no tokenizer is loaded: prompts are token ids, and outputs have no text",
    )  # fmt: skip
    generation_config: str = _engine(
        "auto", "defaults of sampling: auto (the model's generation_config.json), vllm (none), or a folder or hub id",
        metavar="SOURCE",
        row="source of the defaults of sampling parameters, and of tokens that end an answer: `auto`, the model's "
        "`generation_config.json`; `vllm`, no defaults; or a folder or hub id with such a file "
        "([below](#generation-config))",
    )  # fmt: skip
    override_generation_config: str = _engine(
        "", "values before those of generation_config.json, as JSON", metavar="JSON",
        row="keys of `generation_config.json` as JSON (in Python also a dict), which come before those of the file",
    )  # fmt: skip
    runner: Runner = _engine(
        "auto", "what the model is for: pooling serves embeddings and scores too; auto goes by its folder",
        row="`pooling`: the model gives embeddings, or scores, too ([embeddings.md](embeddings.md)); `generate`: it "
        "does not; `auto`: it does if its folder says how (`1_Pooling`, `1_LogitScore`, a base model without a head)",
    )  # fmt: skip
    hf_overrides: str = _engine(
        "", "keys of config.json about embeddings and scores, as JSON", metavar="JSON",
        row="JSON object with keys that are taken from here instead of `config.json`: `is_matryoshka`, "
        "`matryoshka_dimensions`, `classifier_from_token`, `is_original_qwen3_reranker`, `architectures`; for "
        "embeddings and scores alone ([embeddings.md](embeddings.md)). In Python also a dict",
    )  # fmt: skip
    chat_template: str | None = _engine(
        None, "file, or text, of a chat template in place of the model's", metavar="FILE|TEXT",
        shown_default="the model's",
        row="chat template in place of the model's: the path of a file, or the template itself (a text with braces or "
        "line breaks); `None`: the model's",
    )  # fmt: skip
    dtype: Dtype = _engine(
        "auto", "of weights, activations and KV cache: auto (the model's), float32, bfloat16 or float16",
        metavar="DTYPE",
        row="of weights, activations and KV cache: `auto` (the model's), `float32`, `bfloat16`, `float16`",
    )  # fmt: skip
    kv_cache_dtype: KVCacheDtype = _engine(
        "auto", "of the KV cache: auto (that of the kernels), int8_per_token_head, fp8_per_token_head or fp8",
        metavar="DTYPE",
        row="of the KV cache: `auto` (that in which the kernels compute); `int8_per_token_head` or "
        "`fp8_per_token_head`, 8 bits with a scale for each token and KV head; `fp8`, 8 bits without stored scales; "
        "`float32`, `bfloat16` or `float16` is refused unless it is what `auto` means "
        "([quantization.md](quantization.md#kv-cache-in-8-bits))",
    )  # fmt: skip
    quantization: Method | None = _engine(
        None, "int8 or int4 quantizes linear layers while they are loaded; awq, gptq, compressed-tensors, fp8, mxfp4 "
        "and gguf check what the folder says", short="-q", metavar="FORMAT", shown_default="as the folder says",
        row="`int8` or `int4`: float weights of linear layers are quantized while they are loaded, the output head to "
        "int8 ([quantization.md](quantization.md)). `awq`, `gptq`, `compressed-tensors`, `fp8`, `mxfp4`, `gguf`: the "
        "format of the checkpoint, which is checked. `None`: as the checkpoint is",
    )  # fmt: skip
    quantization_group_size: int = _engine(
        DEFAULT_GROUP_SIZE, "inputs that share a scale, of int8 and int4; -1: all of an output", low=WHOLE_ROW,
        row="of `int8` and `int4`: inputs of an output that share a scale, a multiple of 32; -1: all of them",
    )  # fmt: skip
    quantization_activations: Activations | None = _engine(
        None, "arithmetic of integer weights: int8 activations, or weights expanded to bfloat16", metavar="DTYPE",
        shown_default="int8 for groups of at least 16",
        row="arithmetic of layers with integer weights: `int8`, activations are rounded to int8; `bfloat16`, weights "
        "are expanded to the model's dtype as they are used; `None`: `int8` where groups have at least 16 inputs",
    )  # fmt: skip
    device: Device = _engine(
        "auto", "where the model runs",
        row="`cpu`; `cuda`, refused where torch sees no GPU or Triton is not installed; `auto`: a GPU where both are "
        "there ([gpu.md](gpu.md))",
    )  # fmt: skip
    exact: bool | None = _engine(
        None, "answers on a GPU that do not depend on the other requests, for slower products",
        shown_default="off on a GPU; always on for a CPU",
        row="`True`: on a GPU, too, a row's logits have the same bits alone and in any batch "
        "([gpu.md](gpu.md#exact)); `None`: not on a GPU. On a CPU they always have, and `False` is refused",
    )  # fmt: skip
    attention_backend: AttentionBackEndName = _engine(
        "auto", "attention kernels of a GPU: triton, cuda (C++, for decodes) or flashinfer; auto is triton",
        metavar="NAME",
        row="attention kernels of a GPU: `triton`; `cuda`, the paper's kernel in CUDA C++ for decodes, and Triton's "
        "for prompts; `flashinfer`, if it is installed; `auto` is `triton` ([gpu.md](gpu.md#attention-back-ends)). "
        "What they do not support is refused at start, and so is anything but `auto` on a CPU",
    )  # fmt: skip
    capture_graphs: bool = _engine(
        False, "capture the CUDA graphs of all steps at start, not as they are needed",
        row="`True`: on a GPU the graphs of all steps are captured at start ([gpu.md](gpu.md#graphs-of-steps)), which "
        "takes longer; `False`: each after a few steps that need it, of which one then takes longer. Refused on a CPU",
    )  # fmt: skip
    enforce_eager: bool = _engine(
        False, "run steps on a GPU without CUDA graphs",
        row="`True`: on a GPU no step is replayed as a CUDA graph: slower, with the same tokens. A CPU has none",
    )  # fmt: skip
    cudagraph_capture_sizes: tuple[int, ...] = _engine(
        (), "tokens of the steps on a GPU that CUDA graphs are captured for (repeatable)", metavar="TOKENS",
        shown_default="up to 256, and 512 with chunks of prompts", parse=parse_sizes,
        row=f"sizes in tokens, at most {MAX_GRAPH_SIZES} from 1 to {MAX_GRAPH_TOKENS:,}, that CUDA graphs are captured "
        "at; a smaller step is padded to the next one, a larger one runs without a graph; sizes beyond "
        "`max_num_batched_tokens` are left out. Empty: 1, 2, 4, 8 and multiples of 16 up to 256, for steps with "
        "chunks of prompts 16, 32 and multiples of 64 up to 512 ([gpu.md](gpu.md#graphs-of-steps)). On a CPU without "
        "effect",
    )  # fmt: skip
    max_cudagraph_capture_size: int | None = _engine(
        None, "the largest of these sizes, where they are not given", low=1, high=MAX_GRAPH_TOKENS, metavar="TOKENS",
        shown_default="256, and 512 with chunks of prompts",
        row="the usual ones of these sizes up to this one; with `cudagraph_capture_sizes` it must be the largest of "
        "them; `None`: 256, and 512 for steps with chunks",
    )  # fmt: skip
    max_model_len: int | None = _engine(
        None, "longest prompt and output, tokens", low=1, shown_default="the model's, cut to what the KV cache holds",
        row="longest prompt and output together, tokens; `None`: the model's, cut to what the KV cache holds. The "
        "model's is `max_position_embeddings`; with `rope_scaling` of type `linear` that times the factor, with `yarn` "
        "`original_max_position_embeddings` times the factor, with `llama3` as it is. `dynamic` provides its factor "
        "times as much, but only if asked for by this setting, since it changes all answers "
        "([decision 0014](decisions/0014-dynamic-ntk-by-the-longest-sequence.md)). At most 16,777,216. Rotary tables "
        "take 4 bytes x head size for each position that can be used",
    )  # fmt: skip
    block_size: int = _engine(
        DEFAULT_BLOCK_SIZE, "tokens per KV block", low=1, row="tokens per KV block: 8, 16, 32, 64 or 128"
    )
    kv_cache_memory: int | str | None = _engine(
        None, "bytes; 512MiB, 4GiB", metavar=SIZE, low=1, shown_default="40 % of the free memory on a CPU",
        row='for the KV cache: bytes, or text such as `"512MiB"`, `"4GiB"`; `None`: 40 % of the free memory, on a GPU '
        "what `gpu_memory_utilization` leaves; never more than `max_num_seqs` full-length sequences can use",
    )  # fmt: skip
    num_kv_blocks: int | None = _engine(
        None, "exact number of KV blocks; wins over the above", low=1, shown_default="from the above",
        row="exact number of blocks; wins over `kv_cache_memory`",
    )  # fmt: skip
    swap_space: int | str | None = _engine(
        None, "bytes for the blocks of preempted requests, of a file, or of host memory for a GPU; 4GiB",
        metavar=SIZE, shown_default="none on a CPU, 4GiB for a GPU",
        row="for the blocks of preempted requests: bytes, or text as above, of a file, or of pinned host memory for a "
        "GPU; 0: none; `None`: none; for a GPU the least of 4 GiB, half of the host's free memory and what all "
        "sequences can use",
    )  # fmt: skip
    num_swap_blocks: int | None = _engine(
        None, "exact number of its blocks; wins over the above", low=0, shown_default="from the above",
        row="exact number of blocks of the swap space; wins over `swap_space`",
    )  # fmt: skip
    swap_dir: str | None = _engine(
        None, "where that file is", metavar="FOLDER", shown_default="the temporary directory",
        row="folder of the swap file; `None`: the directory for temporary files. The file has no name, takes all its "
        "room at start, and is freed with the process",
    )  # fmt: skip
    gpu_memory_utilization: float = _engine(
        0.9, "share of a GPU for weights, activations and KV cache", low=0, is_low_excluded=True, high=1,
        row="share of a GPU for weights, activations and KV cache, above 0 and at most 1; this engine's own: two with "
        "0.45 each fit side by side",
    )  # fmt: skip
    max_num_seqs: int | None = _engine(
        None, "sequences in one step", low=1, high=MAX_NUM_SEQS, flag_default=DEFAULT_MAX_NUM_SEQS,
        row=f"sequences in one step, at most {MAX_NUM_SEQS:,}; `None`: {DEFAULT_MAX_NUM_SEQS}",
    )  # fmt: skip
    max_num_batched_tokens: int | None = _engine(
        None, "tokens in one step", low=1, flag_default=DEFAULT_MAX_NUM_BATCHED_TOKENS,
        row=f"tokens in one step; `None`: {DEFAULT_MAX_NUM_BATCHED_TOKENS}. A prompt that needs more than half of it "
        "leaves the other half to other requests as far as they can use it, so short requests do not wait for long "
        "ones",
    )  # fmt: skip
    itl_target_ms: float | str | None = _engine(
        None, "longest step beside a running stream: prompts have shorter chunks; or none", metavar=MS,
        flag_default=DEFAULT_ITL_TARGET_MS,
        row="the longest that a step is planned to take while a sequence decodes, so the longest gap between tokens "
        "of a stream: prompts are computed in chunks that fit, by the times of the steps before "
        f"([below](#targets-of-time)). The default of commands is {DEFAULT_ITL_TARGET_MS}, but for `generate` and "
        "`run-batch`; `None`, or `none` on the command line: no limit but `max_num_batched_tokens`",
    )  # fmt: skip
    ttft_target_ms: float | str | None = _engine(
        None, "time to a first token for which long prompts are hurried; or none", metavar=MS, shown_default="none",
        row="the time from a request's arrival to its first token that prompts should meet: a long one that still can "
        "has a larger part of the steps, never past `itl_target_ms`, and at most half beside other long ones that came "
        "first ([below](#targets-of-time)); `None`, or `none`: prompts are not hurried",
    )  # fmt: skip
    enable_prefix_caching: bool = _engine(
        True, "keep what has been computed, and find it again for prompts that begin alike",
        row="`True`: what has been computed is kept while there is room, and found again by prompts that begin alike",
    )  # fmt: skip
    enable_jump_forward: bool = _engine(
        True, "append tokens that a grammar forces without sampling them, and compute them as one chunk",
        row="`True`: a token that is the only one that a grammar allows is appended without sampling, and a run of "
        "them is computed as a chunk; the same tokens",
    )  # fmt: skip
    speculative_config: str = _engine(
        "", "speculative decoding, as JSON: method, model, num_speculative_tokens, ...", metavar="JSON",
        row="speculative decoding: a JSON object (in Python also a dict) with `method` (`ngram`, `suffix` or "
        f"`draft_model`), `model`, `num_speculative_tokens` (1 to {MAX_DRAFTS}; {DEFAULT_DRAFTS}), `prompt_lookup_min` "
        "and `prompt_lookup_max`; the same tokens. Not with static batches, nor with a `memory_policy` other than "
        "`paged`",
    )  # fmt: skip
    spec_method: str | None = _engine(
        None, "its method: ngram, suffix or draft_model", metavar="METHOD", row="key `method` of `speculative_config`"
    )
    spec_model: str | None = _engine(
        None, "its draft model: folder, GGUF file or hub id", metavar="MODEL", row="key `model` of `speculative_config`"
    )
    spec_tokens: int | None = _engine(
        None, "the most tokens of a draft", low=1, high=MAX_DRAFTS, shown_default=str(DEFAULT_DRAFTS),
        row="key `num_speculative_tokens` of `speculative_config`",
    )  # fmt: skip
    enable_lora: bool = _engine(
        False, "serve LoRA adapters beside the model",
        row="`True`: requests may name LoRA adapters ([adapters.md](adapters.md)). With `memory_policy` "
        "`paged` and continuous batching",
    )  # fmt: skip
    max_loras: int | None = _engine(
        None, "adapters of the requests that run at once", low=1, high=MAX_ADAPTERS,
        shown_default=f"{DEFAULT_MAX_LORAS}, or max_cpu_loras if that is lower",
        row=f"different adapters of the requests that run at once; others wait; `None`: {DEFAULT_MAX_LORAS}, or "
        "`max_cpu_loras` if that is lower",
    )  # fmt: skip
    max_cpu_loras: int | None = _engine(
        None, "adapters in memory", low=1, high=MAX_ADAPTERS, shown_default="max_loras",
        row="adapters in memory, at least `max_loras`; the one not used for longest is dropped, and read again when a "
        "request names it; `None`: `max_loras`",
    )  # fmt: skip
    max_lora_rank: int = _engine(
        DEFAULT_MAX_RANK, "highest rank of an adapter", low=1, high=MAX_RANK,
        row="highest rank of an adapter, which bounds its memory",
    )  # fmt: skip
    preemption_mode: PreemptionMode = _engine(
        "auto", "how a preempted request comes back",
        row="how a preempted request is resumed: `recompute`; `swap`, its blocks are moved out and back in; `auto`, "
        "the cheaper of the two for each request, by measured rates. Where the swap space is full, or there is none, "
        "tokens are computed again; `swap` without swap space is refused",
    )  # fmt: skip
    scheduling_policy: SchedulingPolicy = _engine(
        "priority", "order of admission: by priority, by arrival (fcfs), or by the service of each client (fair)",
        row="order of admission: `priority` (the lowest first, then by arrival); `fcfs` (by arrival; a priority other "
        "than 0 is refused); `fair` (the client with the least service first; see "
        "[Scheduling policies](#scheduling-policies))",
    )  # fmt: skip
    cpu_isa: CpuIsa = _engine(
        "auto", "instruction set of the CPU's kernels; auto is the best there is",
        row="instruction set of the CPU's kernels: `auto` (the best that the CPU has), `amx`, `avx512_bf16`, "
        "`avx512_vnni`, `avx512`, `avx2`, `portable`",
    )  # fmt: skip
    seed: int = _engine(
        0, "of requests that bring none", row="of the engine: a request without a seed draws from this and its number"
    )
    max_logprobs: int = _engine(
        20, "highest logprobs and prompt_logprobs of a request; -1: the size of the vocabulary", low=-1,
        row="highest `logprobs` and `prompt_logprobs` of a request; -1: the size of the vocabulary",
    )  # fmt: skip
    memory_policy: MemoryPolicy = option(
        "paged", "how KV blocks are given out; all but paged reserve one chunk per sequence", kind="none",
        row="`paged`; or a baseline, for measurements: one contiguous chunk per sequence, by a buddy allocator, "
        "reserved at admission: `contiguous-max` (`max_model_len` tokens), `contiguous-pow2` (the prompt and the next "
        "power of two of `max_tokens`), `contiguous-oracle` (the prompt and `max_tokens`). Nothing is shared, cached "
        "or swapped; a fork, and a beam that extends another, copies. The same tokens",
    )  # fmt: skip
    batching: Batching = option(
        "continuous", "static: whole batches, one after the other; needs contiguous-max", kind="none",
        row="`continuous`; or `static`, with `contiguous-max`: as many as fit run as one batch until the last has "
        "ended, and all are answered then",
    )  # fmt: skip
    data_parallel_size: int = _engine(
        1, "engines behind one server, which divide memory and threads", low=1, high=MAX_ENGINES, short="-dp",
        row=f"engines behind one server, or behind an `LLM`, 1 to {MAX_ENGINES}: above 1 each is a process with the "
        "whole model; `kv_cache_memory`, `num_kv_blocks`, `swap_space`, `num_swap_blocks`, their defaults and the "
        "CPU's threads are divided among them; the same tokens ([scaling.md](scaling.md)). On CPUs",
    )  # fmt: skip
    tensor_parallel_size: int = _engine(
        1, "processes that share the model and each step; on CPUs, with the same tokens", low=1, high=64, short="-tp",
        row="processes that share the model and each step: on CPUs with the same tokens, to the bit "
        "([scaling](scaling.md)); on GPUs one for each ([gpu](gpu.md#several-gpus))",
    )  # fmt: skip
    tensor_parallel_mode: TensorParallelMode = _engine(
        "auto", "division of layers among these processes: gather, with the same tokens; reduce, with fewer exchanges",
        row="division of layers among these processes: `gather`, by outputs, with the same tokens for any number of "
        "processes; `reduce`, with half as many exchanges and the same tokens for the same number "
        "([scaling](scaling.md#gather-or-reduce)); `auto`: `gather` on CPUs and with `exact`, else `reduce`",
    )  # fmt: skip
    distributed_executor_backend: ExecutorBackend = _engine(
        "auto", "start of these processes: ray places them on a Ray cluster; auto is mp; uni is one process",
        row="start of these processes: `mp`, by this command (and by those of the other nodes); `ray`, on a Ray "
        "cluster ([scaling](scaling.md#ranks-on-a-ray-cluster)); `auto`, which is `mp`; or `uni`, for one process",
    )  # fmt: skip
    nnodes: int = _engine(
        1, "machines that these processes are on, each with as many; start the same command on each", low=1, high=64,
        short="-n",
        row="machines (nodes) that these processes are on, each with as many: the same command is started on each of "
        "them ([scaling](scaling.md#several-machines-by-hand))",
    )  # fmt: skip
    node_rank: int = _engine(
        0, "number of this machine, from 0: that serves", low=0, high=63, short="-r",
        row="number of this machine, from 0; node 0 has the engine, and the others are started by `quire serve`",
    )  # fmt: skip
    master_addr: str = _engine(
        "127.0.0.1", "address of node 0 for the other nodes", metavar="HOST",
        row="address of node 0, at which it listens for the other nodes; one beyond this machine needs "
        "`node_secret_file`. With `ray` the default is Ray's address of this machine, and the port a free one",
    )  # fmt: skip
    master_port: int = _engine(
        29501, "port of node 0 for the other nodes", low=1, high=65535,
        row="port of node 0, at which it listens for the other nodes",
    )  # fmt: skip
    node_secret_file: str | None = _engine(
        None, "file with a secret that all nodes share", metavar="FILE",
        row="file with a secret of 16 to 4,096 bytes, the same on all nodes, without which none joins the run",
    )  # fmt: skip
    allow_public_master_addr: bool = _engine(
        False, "let master_addr be a public address: what nodes exchange is not encrypted",
        row="`True`: `master_addr` may be an address of no private network; what the nodes exchange is not encrypted",
    )  # fmt: skip
    stall_limit: float = option(
        10.0, "seconds without a heartbeat of a rank, after which the engine ends", kind="none",
        low=1, high=86400, unit="seconds",
        row="seconds, at least 1: with `tensor_parallel_size` above 1, a process without heartbeats for so long counts "
        "as lost, and the engine ends; with `data_parallel_size` above 1, an engine without progress for so long is "
        "ended and started again",
    )  # fmt: skip
    start_timeout: float = option(
        START_TIMEOUT_S, "seconds for machines to find each other, or without a sign of life of an engine that starts",
        kind="none", low=1, high=86400, unit="seconds",
        row="seconds, at least 1: with `nnodes` above 1, four fifths of it are for the other nodes to find node 0, and "
        "nine tenths for it to find all of them; with `ray`, half for Ray to find room; with `data_parallel_size` "
        "above 1, an engine that starts and neither uses CPU time nor reads for so long is given up",
    )  # fmt: skip
    max_kv_share_per_key: float = option(
        1.0, "share of the KV blocks that the requests of a key may hold", kind="none",
        low=0, is_low_excluded=True, high=1,
        row="for servers: share of the KV blocks, above 0 and at most 1, that the running requests of one client may "
        "hold; the requests of an `LLM` are of one client",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check types and ranges; what depends on the model is checked when it is known."""
        check_options(self)
        if self.block_size not in KERNEL_BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {KERNEL_BLOCK_SIZES}, got {self.block_size}")
        if self.batching == "static" and self.memory_policy != "contiguous-max":
            raise ConfigError(f"batching 'static' needs memory_policy 'contiguous-max', got {self.memory_policy!r}")
        if self.max_kv_share_per_key < 1 and self.memory_policy != "paged":
            raise ConfigError(
                f"max_kv_share_per_key {self.max_kv_share_per_key} needs memory_policy 'paged', "
                f"got {self.memory_policy!r}"
            )
        if self.speculation is not None and (self.batching, self.memory_policy) != ("continuous", "paged"):
            raise ConfigError(
                f"speculative_config needs batching 'continuous' and memory_policy 'paged', got {self.batching!r} and "
                f"{self.memory_policy!r}"
            )
        if self.tokenizer is None and self.tokenizer_revision not in (None, self.revision):
            raise ConfigError(
                f"tokenizer_revision {self.tokenizer_revision!r} needs a tokenizer: the model's own is of its revision"
            )
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"distributed_executor_backend 'uni' is one process: tensor_parallel_size must be 1, got "
                f"{self.tensor_parallel_size}"
            )
        self._check_graphs()
        self._check_nodes()
        self._check_swap()
        self._check_adapters()
        if self.model_impl == "transformers" and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size}: not supported for a model through transformers "
                "(model_impl)"
            )
        self._check_override()
        _ = self.quantization_options, self.given_chat_template

    @property
    def model_files(self) -> tuple[str, ...]:
        """Patterns of the files of a hub id that are needed, as of `resolve_model`."""
        return TOKENIZER_FILES if self.load_format == "dummy" else HUB_FILES

    @property
    def resolved_max_num_seqs(self) -> int:
        """Sequences in one step, set or by default."""
        return self.max_num_seqs or DEFAULT_MAX_NUM_SEQS

    @property
    def resolved_max_num_batched_tokens(self) -> int:
        """Tokens in one step, set or by default."""
        return self.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS

    @property
    def itl_target_s(self) -> float:
        """The longest time of a step with a decode, in seconds; infinity without a limit."""
        return math.inf if self.itl_target_ms is None else parse_ms(self.itl_target_ms, "itl_target_ms") / 1000

    @property
    def ttft_target_s(self) -> float:
        """The time to a first token for which prompts are hurried, in seconds; infinity without one."""
        return math.inf if self.ttft_target_ms is None else parse_ms(self.ttft_target_ms, "ttft_target_ms") / 1000

    def tensor_parallel_mode_on(self, device: str) -> Mode:
        """Return the division of layers on a device, set or by default: of GPUs it is `reduce`, unless exact."""
        if self.tensor_parallel_mode != "auto":
            return self.tensor_parallel_mode
        return "gather" if device == "cpu" or self.exact else "reduce"

    @property
    def is_over_network(self) -> bool:
        """Whether ranks of one model may be on several machines."""
        return self.nnodes > 1 or (self.distributed_executor_backend == "ray" and self.tensor_parallel_size > 1)

    @property
    def given_chat_template(self) -> str | None:
        """The chat template in place of the model's. Raises ConfigError if there is none at the path."""
        return given_chat_template(self.chat_template)

    @property
    def quantization_options(self) -> QuantizationOptions:
        """The quantization that is asked for. Raises ConfigError for a group size that there is none of."""
        return QuantizationOptions(self.quantization, self.quantization_group_size, self.quantization_activations)

    @property
    def speculation(self) -> SpeculationConfig | None:
        """The speculative decoding that is asked for, or None. Raises ConfigError for what is not supported."""
        return parse_speculation(self.speculative_config, self.spec_method, self.spec_model, self.spec_tokens)

    @property
    def resolved_max_loras(self) -> int:
        """Adapters of running requests, set or by default."""
        return self.max_loras or min(DEFAULT_MAX_LORAS, self.max_cpu_loras or DEFAULT_MAX_LORAS)

    @property
    def resolved_max_cpu_loras(self) -> int:
        """Adapters in memory, set or by default."""
        return self.max_cpu_loras or self.resolved_max_loras

    def _check_adapters(self) -> None:
        if self.resolved_max_cpu_loras < self.resolved_max_loras:
            raise ConfigError(f"max_cpu_loras must be at least max_loras {self.max_loras}, got {self.max_cpu_loras}")
        if self.enable_lora and (self.batching, self.memory_policy) != ("continuous", "paged"):
            raise ConfigError(
                f"enable_lora needs batching 'continuous' and memory_policy 'paged', got {self.batching!r} and "
                f"{self.memory_policy!r}"
            )

    def _check_graphs(self) -> None:
        given, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        wrong: list[object] = [given]
        if isinstance(given, tuple | list) and len(given) <= MAX_GRAPH_SIZES:
            wrong = [size for size in given if type(size) is not int or not 1 <= size <= MAX_GRAPH_TOKENS]
        if wrong:
            raise ConfigError(
                f"cudagraph_capture_sizes must be at most {MAX_GRAPH_SIZES} integers from 1 to {MAX_GRAPH_TOKENS}, "
                f"got {shown(wrong[0])}"
            )
        if self.enforce_eager and self.capture_graphs:
            raise ConfigError("capture_graphs True needs graphs, of which enforce_eager True has none")
        if given and largest not in (None, max(given)):
            raise ConfigError(
                f"max_cudagraph_capture_size must be the largest of cudagraph_capture_sizes, {max(given)}, "
                f"got {largest}"
            )

    def _check_nodes(self) -> None:
        if self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"nnodes must divide tensor_parallel_size {self.tensor_parallel_size}, got {self.nnodes}: each node "
                "has as many of these processes"
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank must be below nnodes {self.nnodes}, got {self.node_rank}")
        name = f"nnodes {self.nnodes}" if self.nnodes > 1 else "distributed_executor_backend 'ray'"
        if self.is_over_network and self.data_parallel_size > 1:
            raise ConfigError(
                f"{name} does not go with data_parallel_size {self.data_parallel_size}: start replicas on several "
                "machines by `quire deploy`, on a Ray cluster, or a server on each machine behind a router"
            )
        if self.distributed_executor_backend == "ray" and self.node_rank:
            raise ConfigError(f"node_rank {self.node_rank} is for nodes that are started by hand: Ray starts them all")
        if self.distributed_executor_backend == "ray" and self.node_secret_file is not None:
            raise ConfigError("node_secret_file is for nodes that are started by hand: with Ray a run makes its own")

    def _check_swap(self) -> None:
        swap_bytes = 0 if self.swap_space is None else parse_bytes(self.swap_space, "swap_space", low=0)
        num_swap_blocks = swap_bytes if self.num_swap_blocks is None else self.num_swap_blocks
        has_default = self.device == "cuda" and self.swap_space is None and self.num_swap_blocks is None
        if self.preemption_mode == "swap" and num_swap_blocks == 0 and not has_default:
            raise ConfigError("preemption_mode 'swap' needs a swap space; set swap_space or num_swap_blocks above 0")
        if self.memory_policy != "paged" and num_swap_blocks > 0:
            raise ConfigError(f"memory_policy {self.memory_policy!r} does not swap; leave swap_space out")

    def _check_override(self) -> None:
        if not self.generation_config:
            raise ConfigError("generation_config must be auto, vllm, a folder or a hub id, got ''")
        parse_json_object(self.override_generation_config, OVERRIDE)
