"""Puts an engine together from options: model, memory, scheduler, executor."""

from dataclasses import dataclass

import torch

from quire.cache.contiguous import make_manager
from quire.core.config import CacheConfig
from quire.engine.engine import Engine
from quire.engine.input_processor import InputProcessor
from quire.engine.options import EngineOptions
from quire.engine.sizing import ModelLimits, free_memory_bytes, size_engine
from quire.execution.batch import PersistentBatch
from quire.execution.executor import LocalExecutor
from quire.execution.swap_storage import allocate_swap_space
from quire.execution.swapper import Swapper
from quire.execution.worker import Worker
from quire.kernels.back_end import choose_back_end
from quire.model.config import read_config, spec_from_config
from quire.model.config_reader import CONFIG_FILE
from quire.model.decoder import Decoder
from quire.model.footprint import kv_bytes_per_token
from quire.model.generation_config import eos_token_ids
from quire.model.kv_cache import KVCache
from quire.model.loader import load_model
from quire.model.resolve import resolve_model
from quire.scheduling.static_batching import make_scheduler
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """An engine that is ready to step, and what stands around it."""

    engine: Engine
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    model: Decoder
    eos_token_ids: frozenset[int]
    kv_bytes_per_token: int


def assemble(options: EngineOptions, *, takes_text: bool) -> AssembledEngine:
    """Load the model, size the cache, and return an engine. ModelError and ConfigError say what cannot work.

    One that takes no text, since another process tokenizes for it, does not load the tokenizer.
    """
    folder = resolve_model(options.model)
    config = read_config(folder)
    tokenizer = Tokenizer.from_folder_if_any(folder) if takes_text else None
    head_dim = spec_from_config(config, str(folder / CONFIG_FILE)).head_dim
    back_end = choose_back_end(torch.device("cpu"), isa=options.cpu_isa, head_dim=head_dim)
    model = load_model(
        folder, dtype=options.dtype, device="cpu", back_end=back_end, max_positions=options.max_model_len
    )
    spec = model.spec
    token_bytes = kv_bytes_per_token(spec, back_end.cache_layout.dtype(model.dtype).itemsize)
    limits = ModelLimits(spec.max_position_embeddings, token_bytes, spec.sliding_window)
    cache_config, scheduler_config = size_engine(options, limits, free_memory_bytes())
    batch = PersistentBatch(
        scheduler_config.max_num_seqs, scheduler_config.max_model_len, cache_config.block_size, spec.vocab_size
    )
    cache = KVCache.allocate(spec, cache_config.num_blocks, cache_config.block_size, model.dtype, back_end)
    swapper = None if cache_config.num_swap_blocks == 0 else _swapper(options, cache_config, model, cache)
    executor = LocalExecutor(Worker(model, cache, batch, swapper).execute)
    scheduler = make_scheduler(scheduler_config, make_manager(cache_config))
    ends = eos_token_ids(folder, config, spec.vocab_size)
    inputs = InputProcessor(
        tokenizer,
        scheduler.limits,
        vocab_size=spec.vocab_size,
        eos_token_ids=ends,
        engine_seed=options.seed,
        max_logprobs=options.max_logprobs,
    )
    return AssembledEngine(Engine(scheduler, executor), inputs, tokenizer, model, ends, limits.kv_bytes_per_token)


def _swapper(options: EngineOptions, config: CacheConfig, model: Decoder, cache: KVCache) -> Swapper:
    space = allocate_swap_space(
        model.spec, config.num_swap_blocks, config.block_size, model.dtype, model.back_end, options.swap_dir
    )
    return Swapper(cache, space, model.back_end.swap_blocks)
