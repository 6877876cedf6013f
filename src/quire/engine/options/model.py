"""Options of a model: its files, its tokenizer, the form of its weights, and LoRA adapters."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

from quire.core.checks import shown
from quire.core.errors import ConfigError
from quire.core.hub import HUB_FILES, TOKENIZER_FILES
from quire.core.image_processing import PixelLimits
from quire.core.lora import DEFAULT_MAX_LORAS, DEFAULT_MAX_RANK, MAX_ADAPTERS, MAX_RANK
from quire.core.options import option, parse_json_object
from quire.core.pooling import Runner
from quire.model.quantization import DEFAULT_GROUP_SIZE, WHOLE_ROW, Activations, Method, QuantizationOptions
from quire.text.text_settings import given_chat_template

_lora = partial(option, panel="LoRA")
_model = partial(option, panel="Model")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "quire", "transformers"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ModelOptions:
    """A model and what is read with it."""

    model: str | None = option(
        None, "folder, GGUF file, hub id, owner/name:Q4_K_M for a GGUF file of a hub, or a name of models.toml",
        kind="argument", metavar="MODEL", shown_default="the bundled demo model",
        row="folder in Hugging Face format, GGUF file ([quantization.md](quantization.md#gguf-files)), hub id, "
        "`owner/name:Q4_K_M` for a GGUF file of a hub, or a name of your own ([model-names.md](model-names.md)); "
        "`None` is the bundled demo model",
    )  # fmt: skip
    _: KW_ONLY
    tokenizer: str | None = _model(
        None, "of another model: folder, GGUF file or hub id", metavar="MODEL", shown_default="the model's own",
        row="folder, GGUF file or hub id with the tokenizer and the chat template; `None`: the model's own. For GGUF "
        "files with a vocabulary that is not read",
    )  # fmt: skip
    revision: str | None = _model(
        None, "branch, tag or commit of the model's hub id", metavar="NAME", shown_default="the default branch",
        row="branch, tag or commit of a hub id; `None`: the default branch. Folders and files have none",
    )  # fmt: skip
    tokenizer_revision: str | None = _model(
        None, "branch, tag or commit of the tokenizer's hub id", metavar="NAME", shown_default="the default branch",
        row="the same of the hub id that `tokenizer` names; the model's own tokenizer is of `revision`",
    )  # fmt: skip
    model_impl: ModelImpl = _model(
        "auto", "layers of the model: Quire's own, transformers' on Quire's cache, or auto: its own where it has them",
        row="layers of the model: `quire`, its own; `transformers`, those of the transformers library on Quire's cache "
        "([models.md](models.md#through-transformers)); `auto`, its own where it has them",
    )  # fmt: skip
    load_format: LoadFormat = _model(
        "auto", "weights: those of the model's files, or dummy: random ones of the shapes in config.json, for "
        "measurements without weights",
        row="weights: `auto`, those of the model's files; `dummy`, random ones of the shapes in a folder's "
        "`config.json`, for measurements ([models.md](models.md#random-weights)): answers mean nothing, and weights "
        "are neither read nor downloaded. A draft model has them, too",
    )  # fmt: skip
    mmproj: str | None = _model(
        None, "GGUF file of the model's encoder of images, beside a model in a GGUF file", metavar="FILE",
        shown_default="none",
        row="GGUF file of an encoder of images, which llama.cpp calls mmproj, beside a model in a GGUF file "
        "([quantization.md](quantization.md#encoders-of-images)); `None`: such a file reads text alone",
    )  # fmt: skip
    skip_tokenizer_init: bool = _model(
        False, "load no tokenizer: prompts are token ids, and answers have no text",
        row="`True`: no tokenizer is loaded: prompts are token ids, and outputs have no text",
    )  # fmt: skip
    runner: Runner = _model(
        "auto", "what the model is for: pooling serves embeddings and scores too; auto goes by its folder",
        row="`pooling`: the model gives embeddings, or scores, too ([embeddings.md](embeddings.md)); `generate`: it "
        "does not; `auto`: it does if its folder says how (`1_Pooling`, `1_LogitScore`, a base model without a head)",
    )  # fmt: skip
    hf_overrides: str = _model(
        "", "keys of config.json about embeddings and scores, as JSON", metavar="JSON",
        row="JSON object with keys that are taken from here instead of `config.json`: `is_matryoshka`, "
        "`matryoshka_dimensions`, `classifier_from_token`, `is_original_qwen3_reranker`, `architectures`; for "
        "embeddings and scores alone ([embeddings.md](embeddings.md)). In Python also a dict",
    )  # fmt: skip
    mm_processor_kwargs: str = _model(
        "", "sizes of images, of a model that reads them in any size, as JSON: min_pixels, max_pixels", metavar="JSON",
        row="JSON object with `min_pixels` and `max_pixels`, in place of those of the model's files: the pixels that "
        "an image is scaled to, of a Qwen-VL or Qwen3.5 ([models.md](models.md#what-to-know)). In "
        "Python also a dict",
    )  # fmt: skip
    chat_template: str | None = _model(
        None, "file, or text, of a chat template in place of the model's", metavar="FILE|TEXT",
        shown_default="the model's",
        row="chat template in place of the model's: the path of a file, or the template itself (a text with braces or "
        "line breaks); `None`: the model's",
    )  # fmt: skip
    dtype: Dtype = _model(
        "auto", "of weights, activations and KV cache: auto (the model's), float32, bfloat16 or float16",
        metavar="DTYPE",
        row="of weights, activations and KV cache: `auto` (the model's), `float32`, `bfloat16`, `float16`",
    )  # fmt: skip
    quantization: Method | None = _model(
        None, "int8 or int4 quantizes linear layers while they are loaded; awq, gptq, compressed-tensors, fp8, mxfp4 "
        "and gguf check what the folder says", short="-q", metavar="FORMAT", shown_default="as the folder says",
        row="`int8` or `int4`: float weights of linear layers are quantized while they are loaded, the output head and "
        "an encoder of images to int8 ([quantization.md](quantization.md)). `awq`, `gptq`, `compressed-tensors`, "
        "`fp8`, `mxfp4`, `gguf`: the format of the checkpoint, which is checked. `None`: as the checkpoint is",
    )  # fmt: skip
    quantization_group_size: int = _model(
        DEFAULT_GROUP_SIZE, "inputs that share a scale, of int8 and int4; -1: all of an output", low=WHOLE_ROW,
        row="of `int8` and `int4`: inputs of an output that share a scale, a multiple of 32; -1: all of them",
    )  # fmt: skip
    quantization_activations: Activations | None = _model(
        None, "arithmetic of integer weights: int8 activations, or weights expanded to bfloat16", metavar="DTYPE",
        shown_default="int8 for groups of at least 16",
        row="arithmetic of layers with integer weights: `int8`, activations are rounded to int8; `bfloat16`, weights "
        "are expanded to the model's dtype as they are used; `None`: `int8` where groups have at least 16 inputs",
    )  # fmt: skip

    packed_weights: str | None = _model(
        None, "folder of packed weights: used where they fit, else made; a start on a CPU then converts nothing",
        metavar="DIR", shown_default="none",
        row="folder of packed weights, or one file of `quire pack`: used where they fit the model and the options, "
        "else made ([quantization.md](quantization.md#packed-weights)); on CPUs, without tensor parallelism. `None`: "
        "weights are packed at each start",
    )  # fmt: skip

    enable_sleep_mode: bool = _model(
        False, "let the operator free the memory of weights and KV cache while nothing runs: /sleep, /wake_up",
        row="`True`: `LLM.sleep`, or `POST /sleep`, frees the KV cache, and at level 2 the weights, until it is woken "
        "([below](#sleep-and-wake)). On one machine",
    )  # fmt: skip

    @property
    def model_files(self) -> tuple[str, ...]:
        """Patterns of the files of a hub id that are needed, as in `resolve_model`."""
        return TOKENIZER_FILES if self.load_format == "dummy" else HUB_FILES

    @property
    def given_chat_template(self) -> str | None:
        """The chat template in place of the model's. Raises ConfigError if there is none at the path."""
        return given_chat_template(self.chat_template)

    @property
    def quantization_options(self) -> QuantizationOptions:
        """The quantization that is asked for. Raises ConfigError for a group size that there is none of."""
        return QuantizationOptions(self.quantization, self.quantization_group_size, self.quantization_activations)

    @property
    def pixel_limits(self) -> PixelLimits:
        """The sizes of images of `mm_processor_kwargs`. ConfigError for other keys and for no sizes."""
        found = parse_json_object(self.mm_processor_kwargs, "mm_processor_kwargs")
        for key, value in found.items():
            if key not in ("min_pixels", "max_pixels"):
                raise ConfigError(f"mm_processor_kwargs can have min_pixels and max_pixels, got {shown(key)}")
            if type(value) is not int or value < 1:
                raise ConfigError(f"mm_processor_kwargs: {key} must be an integer of at least 1, got {shown(value)}")
        return PixelLimits(found.get("min_pixels"), found.get("max_pixels"))

    def _check_model(self) -> None:
        if self.tokenizer is None and self.tokenizer_revision not in (None, self.revision):
            raise ConfigError(
                f"tokenizer_revision {self.tokenizer_revision!r} needs a tokenizer: the model's own is of its revision"
            )
        if self.packed_weights is not None and self.load_format == "dummy":
            raise ConfigError(f"packed_weights {self.packed_weights!r}: load_format 'dummy' has no files to pack")
        _ = self.quantization_options, self.given_chat_template, self.pixel_limits


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LoRAOptions:
    """Adapters that requests may name, and their bounds."""

    enable_lora: bool = _lora(
        False, "serve LoRA adapters beside the model",
        row="`True`: requests may name LoRA adapters ([adapters.md](adapters.md)). With `memory_policy` "
        "`paged` and continuous batching",
    )  # fmt: skip
    max_loras: int | None = _lora(
        None, "adapters of the requests that run at once", low=1, high=MAX_ADAPTERS,
        shown_default=f"{DEFAULT_MAX_LORAS}, or max_cpu_loras if that is lower",
        row=f"different adapters of the requests that run at once; others wait; `None`: {DEFAULT_MAX_LORAS}, or "
        "`max_cpu_loras` if that is lower",
    )  # fmt: skip
    max_cpu_loras: int | None = _lora(
        None, "adapters in memory", low=1, high=MAX_ADAPTERS, shown_default="max_loras",
        row="adapters in memory, at least `max_loras`; the one not used for longest is dropped, and read again when a "
        "request names it; `None`: `max_loras`",
    )  # fmt: skip
    max_lora_rank: int = _lora(
        DEFAULT_MAX_RANK, "highest rank of an adapter", low=1, high=MAX_RANK,
        row="highest rank of an adapter, which bounds its memory",
    )  # fmt: skip

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
