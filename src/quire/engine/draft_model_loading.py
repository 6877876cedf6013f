"""Loading of a draft model, which runs beside the target, in its dtype and on its blocks, and has the same tokens.

The target's settings apply to the draft model: device, dtype, KV cache dtype, instruction set, and int8 or int4 if the
draft model's checkpoint holds floats. The MTP head of the target's own checkpoint is a draft model, too.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from quire.core.arrays import dtype_name
from quire.core.errors import ConfigError, ModelError
from quire.core.model_files import read_bytes
from quire.core.speculation import ScratchBlocks, SpeculationConfig
from quire.engine.formats import read_source, tokenizer_loader
from quire.engine.loading import LoadedModel
from quire.engine.options import EngineOptions
from quire.engine.parallel.link import RankedModel
from quire.engine.sizing import ModelLimits
from quire.execution.batch import PersistentBatch
from quire.execution.drafting.draft_model import DraftModel, HeadDrafter
from quire.kernels.choice import choose_back_end
from quire.model.decoder import Decoder
from quire.model.draft_head import DraftHead
from quire.model.eagle import EagleHead
from quire.model.eagle_config import fitted, read_eagle
from quire.model.kv_cache import KVCache
from quire.model.language_model import LanguageModel
from quire.model.loader import load_model
from quire.model.mtp import MtpHead
from quire.model.quantization import Quantization, QuantizationOptions
from quire.model.resolve import resolve_model
from quire.model.source import ModelSource
from quire.model.spec import DecoderSpec, widest_window
from quire.model.weights import WeightReader
from quire.text.text_settings import TOKENIZER_FILE

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A draft model on the target's device. `max_positions`: positions that it can compute."""

    model: LanguageModel | DraftHead
    max_positions: int
    scratch: ScratchBlocks

    @property
    def pass_bytes(self) -> tuple[int, int]:
        """Bytes of weights that a pass of one token reads, and the part of them that is read for drafts alone."""
        if isinstance(self.model, DraftHead):
            return self.model.pass_bytes
        return self.model.read_bytes if isinstance(self.model, Decoder) else self.model.weight_bytes, 0

    def limits(self, target: ModelLimits, block_size: int) -> ModelLimits:
        """Return the limits of target and draft model together: a token takes bytes in both.

        A block is released early only if all layers of both have sliding windows, behind the widest of these.
        """
        geometry = self.model.kv_geometry
        token_bytes = geometry.bytes_per_token(block_size)
        return replace(
            target,
            kv_bytes_per_token=target.kv_bytes_per_token + token_bytes,
            sliding_window=widest_window([target.sliding_window, geometry.sliding_window]),
            scratch_bytes=self.scratch.num_blocks * block_size * token_bytes,
        )

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return the draft model's keys and values: `num_blocks` blocks like the target's, then the scratch blocks."""
        model = self.model
        return KVCache.allocate(
            model.kv_geometry, num_blocks + self.scratch.num_blocks, block_size, model.back_end
        )

    def drafter(self, cache: KVCache, batch: PersistentBatch) -> DraftModel:
        """Return the drafter over `cache`, as in `allocate_cache`, for the rows of a batch."""
        if isinstance(self.model, DraftHead):
            return HeadDrafter(self.model, cache, batch, self.scratch, self.max_positions)
        return DraftModel(self.model, cache, batch, self.scratch, self.max_positions)


def load_draft_model(
    options: EngineOptions, config: SpeculationConfig, target: LoadedModel, tokenizer: Path
) -> LoadedDraftModel:
    """Load the model that `config` names. `tokenizer`: folder or file of the target's.

    Raises ConfigError, or ModelError, that names the model and what is not supported, or differs from the target.
    """
    assert config.model is not None, "the method draft_model has a model"
    _require_support(target, config)
    try:
        return _load(options, config.model, config.num_speculative_tokens, target, tokenizer)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"speculative_config: draft model {config.model!r}: {error}") from error


def load_mtp_head(
    options: EngineOptions, config: SpeculationConfig, target: LoadedModel, folder: Path
) -> LoadedDraftModel:
    """Load the MTP head of the target's folder or GGUF file. ConfigError if it has none, ModelError for its files.

    The weights are read again for it alone, so that they take no memory unless they are asked for.
    """
    _require_support(target, config)
    where = f"speculative_config: the MTP head of {folder}"
    model, logits = (
        (target.model.own, target.model.logits) if isinstance(target.model, RankedModel) else (target.model, None)
    )
    if not isinstance(model, Decoder) or model.spec.mtp is None:
        raise ConfigError(
            f"speculative_config: {folder} has no MTP head that is read: those of Qwen3-Next, Qwen3.5, GLM-4.5 to 4.7, "
            "DeepSeek V3 and Nemotron 3 Super are, where num_nextn_predict_layers or mtp_num_hidden_layers of "
            "config.json is at least 1, or the block behind the last layer of a GGUF file has nextn tensors"
        )
    source = read_source(folder, options.load_format)
    stored, dtype = source.open_tensors(target.quantization), dtype_name(model.dtype)
    try:
        reader = WeightReader(
            stored.checkpoint, model.spec.mtp.weights, model.back_end, dtype, model.device, stored.weight_format
        )
        head = MtpHead(model, reader, options.kv_cache_dtype, logits)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"{where}: {error}") from error
    log.info("MTP head: %d parameters, %d bytes of weights", head.num_parameters, head.weight_bytes)
    scratch = ScratchBlocks.of(config.num_speculative_tokens, options.resolved_max_num_seqs, options.block_size)
    return LoadedDraftModel(head, target.limits.max_position_embeddings, scratch)


def load_eagle_head(options: EngineOptions, config: SpeculationConfig, target: LoadedModel) -> LoadedDraftModel:
    """Load the EAGLE-3 head that `config` names; the target's `forward` returns from then on what the head reads.

    Raises ConfigError, or ModelError, that names the head and what is not supported, or does not fit the target.
    """
    assert config.model is not None, "the method eagle3 has a model"
    _require_support(target, config)
    where = f"speculative_config: EAGLE-3 head {config.model!r}"
    try:
        return _load_eagle_head(options, config.model, config.num_speculative_tokens, target)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"{where}: {error}") from error


def _load_eagle_head(
    options: EngineOptions, name: str, num_drafts: int, target: LoadedModel
) -> LoadedDraftModel:
    model = target.model.own if isinstance(target.model, RankedModel) else target.model
    assert isinstance(model, Decoder), "a model through transformers"
    if target.pooler is not None:
        raise ConfigError("it is not supported for a model that gives vectors, too")
    source = read_eagle(resolve_model(name, options.model_files), options.load_format)
    spec = fitted(source.spec, model.spec)
    _require_back_end(spec, target, options)
    max_positions = target.limits.max_position_embeddings
    if any(each.dynamic is not None or each.long is not None for each in spec.rotaries):
        max_positions = min(max_positions, spec.default_positions)   # others turn alike at all positions
    stored = source.open_tensors(draft_quantization(source, options.quantization_options))
    reader = WeightReader(
        stored.checkpoint, spec.weights, model.back_end, dtype_name(model.dtype), model.device, stored.weight_format
    )
    head = EagleHead(model, spec, reader, options.kv_cache_dtype, max_positions)
    reader.warn_of_unread()
    assert spec.eagle is not None
    model.tap_layers(spec.eagle.taps)
    log.info(
        "EAGLE-3 head %s: %d parameters, %d bytes of weights, of streams in front of layers %s", name,
        head.num_parameters, head.weight_bytes, ", ".join(map(str, spec.eagle.taps)),
    )  # fmt: skip
    scratch = ScratchBlocks.of(num_drafts, options.resolved_max_num_seqs, options.block_size)
    return LoadedDraftModel(head, max_positions, scratch)


def draft_quantization(source: ModelSource, asked: QuantizationOptions) -> Quantization:
    """Return the quantization of a draft model: that of its files, or the target's int8 or int4 if they hold floats."""
    stored = source.quantization(QuantizationOptions())
    return source.quantization(asked) if asked.rounds_draft_model(stored) else stored


def _require_support(target: LoadedModel, config: SpeculationConfig) -> None:
    """Raise ConfigError for a target that cannot have a draft model."""
    device = str(target.model.device).partition(":")[0]
    if device != "cpu":
        raise ConfigError(f"speculative_config: the method {config.method} is not supported on device {device} yet")
    if not target.generates:
        raise ConfigError("speculative_config: the model has no output head, so there is nothing to draft")


def _require_back_end(spec: DecoderSpec, target: LoadedModel, options: EngineOptions) -> None:
    """Raise ConfigError for a model, or a head, that does not run on the target's back end."""
    needed, found = choose_back_end(target.model.device, isa=options.cpu_isa, head_dim=spec.head_dim), target.model
    if needed.name != found.back_end.name:
        raise ConfigError(
            f"its heads of {spec.head_dim} need the back end {needed.name}, but the model runs on {found.back_end.name}"
        )


def _load(options: EngineOptions, name: str, num_drafts: int, target: LoadedModel, tokenizer: Path) -> LoadedDraftModel:
    folder = resolve_model(name, options.model_files)
    source = read_source(folder, options.load_format)
    spec, back_end = source.spec, target.model.back_end
    if not spec.generates:
        raise ModelError("it has no output head over the vocabulary")
    if spec.has_tails or spec.has_states:
        what = "short convolutions" if spec.has_tails else "states"
        raise ConfigError(f"drafts by a model with {what} are not supported yet")
    require_same_tokens(tokenizer, target.model.vocab_size, folder, spec.vocab_size)
    _require_back_end(spec, target, options)
    max_positions = min(
        target.limits.max_position_embeddings,
        options.max_model_len or spec.default_positions,
        spec.max_position_embeddings,
    )
    model = load_model(
        source, dtype=dtype_name(target.model.dtype), device=target.model.device, back_end=back_end,
        max_positions=options.max_model_len, table_positions=max_positions, kv_cache_dtype=options.kv_cache_dtype,
        quantization=draft_quantization(source, options.quantization_options),
    )  # fmt: skip
    log.info("draft model %s: %d parameters, %d bytes of weights", name, model.num_parameters, model.weight_bytes)
    scratch = ScratchBlocks.of(num_drafts, options.resolved_max_num_seqs, options.block_size)
    return LoadedDraftModel(model, max_positions, scratch)


def require_same_tokens(target: Path, target_size: int, draft: Path, draft_size: int) -> None:
    """Raise ConfigError, which names both, if a token id means one token to one model and another to the other.

    `target` and `draft`: folders or files with the tokenizers; the sizes are of the models' vocabularies. A tokenizer
    that is missing is taken to be the other one's if the sizes are equal. An id that one tokenizer lacks may be a token
    of the other: added tokens differ within a family.
    """
    if _have_equal_files(target, draft):
        return
    load_target, load_draft = tokenizer_loader(target), tokenizer_loader(draft)
    if load_target is None or load_draft is None:
        missing = draft if load_draft is None else target
        if target_size != draft_size:
            raise ConfigError(
                f"its vocabulary has {draft_size} tokens, that of the model {target_size}, and {missing} has no "
                "tokenizer that could show that these are the same ones"
            )
        log.warning(
            "%s has no tokenizer; it is taken to be the other model's: both have %d tokens", missing, draft_size
        )
        return
    of_target, of_draft = load_target(), load_draft()
    for token_id in range(min(of_target.vocab_size, of_draft.vocab_size, target_size, draft_size)):
        expected, found = of_target.token_piece(token_id), of_draft.token_piece(token_id)
        if expected and found and expected != found:
            raise ConfigError(
                f"its tokenizer ({draft}) is not that of the model ({target}): token {token_id} is {found[:80]!r}, but "
                f"{expected[:80]!r} in the model's"
            )


def _have_equal_files(first: Path, second: Path) -> bool:
    """Return whether both are one folder or file, or folders with equal tokenizer.json."""
    if first.resolve() == second.resolve():
        return True
    if not all(path.is_dir() and (path / TOKENIZER_FILE).exists() for path in (first, second)):
        return False  # only tokenizer.json holds all of a tokenizer's tokens
    return read_bytes(first, TOKENIZER_FILE) == read_bytes(second, TOKENIZER_FILE)
