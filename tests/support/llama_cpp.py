"""llama.cpp's library by its C interface, as `include/llama.h` of version 0.5.0 has it: ids of texts, logits of ids.

Structures that it fills and takes by value are larger here than there: what is past the fields named here is its own.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

NUM_THREADS = 1
_ALL_F32 = 0  # a llama_ftype


class _ModelParams(Structure):
    _fields_ = [("own", c_int8 * 256)]


class _ContextParams(Structure):
    _fields_ = [
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32), ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32), ("n_outputs_max", c_uint32), ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32), ("n_threads_batch", c_int32), ("own", c_int8 * 512),
    ]  # fmt: skip


class _QuantizeParams(Structure):
    _fields_ = [
        ("nthread", c_int32), ("ftype", c_int32), ("output_tensor_type", c_int32), ("token_embedding_type", c_int32),
        ("allow_requantize", c_bool), ("own", c_int8 * 256),
    ]  # fmt: skip


class _Batch(Structure):
    _fields_ = [
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", c_void_p), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    ]  # fmt: skip


class LlamaCpp:
    """A GGUF file in llama.cpp, on the CPU; a context manager."""

    def __init__(self, folder: Path, model: Path, num_tokens: int = 4096) -> None:
        """Load a file with the libraries of a folder, for sequences of at most `num_tokens`."""
        self._library = library = _library(folder)
        self._model = library.llama_model_load_from_file(str(model).encode(), library.llama_model_default_params())
        assert self._model, model
        self._vocab = library.llama_model_get_vocab(self._model)
        self.vocab_size = library.llama_vocab_n_tokens(self._vocab)
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = num_tokens
        params.n_ubatch = min(num_tokens, 512)
        params.n_threads = params.n_threads_batch = NUM_THREADS
        self._context = library.llama_init_from_model(self._model, params)
        assert self._context

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt: begun as the file says, with the names of special tokens as these."""
        written = text.encode()
        room = len(written) + 8
        ids = (c_int32 * room)()
        count = self._library.llama_tokenize(self._vocab, written, len(written), ids, room, True, True)
        assert count >= 0, (text, count)
        return ids[:count]

    def logits(self, ids: Sequence[int], start: int = 0) -> Tensor:
        """Return float32 logits [len(ids), vocab_size] of a sequence's positions, computed at once.

        With `start` the sequence goes on: as many positions are known from the calls before.
        """
        return self._logits(ids, start, [1] * len(ids))

    def last_logits(self, ids: Sequence[int], start: int = 0) -> Tensor:
        """Return those of the last position alone, [vocab_size]."""
        return self._logits(ids, start, [0] * (len(ids) - 1) + [1])[0]

    def _logits(self, ids: Sequence[int], start: int, is_wanted: Sequence[int]) -> Tensor:
        library, count = self._library, len(ids)
        memory = library.llama_get_memory(self._context)
        assert library.llama_memory_seq_rm(memory, 0, start, -1)
        batch = library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for n, (token, wanted) in enumerate(zip(ids, is_wanted, strict=True)):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, start + n, 1, wanted
            batch.seq_id[n][0] = 0
        status = library.llama_decode(self._context, batch)
        library.llama_batch_free(batch)
        assert status == 0, status
        address = library.llama_get_logits(self._context)
        num_rows = sum(is_wanted)
        return (
            torch.frombuffer((c_float * (num_rows * self.vocab_size)).from_address(address), dtype=torch.float32)
            .view(num_rows, self.vocab_size)
            .clone()
        )


def write_floats(folder: Path, model: Path, target: Path) -> Path:
    """Write a GGUF file with the tensors of another as float32, expanded by llama.cpp, and return its path."""
    library = _library(folder)
    params = library.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = NUM_THREADS, _ALL_F32, True
    status = library.llama_model_quantize(str(model).encode(), str(target).encode(), ctypes.byref(params))
    assert status == 0, status
    return target


_LIBRARIES: dict[Path, Any] = {}


def _library(folder: Path) -> Any:  # noqa: ANN401 (ctypes finds its attributes by name)
    """Return the library with its functions declared, loaded once; of its kernels those that fit this CPU best."""
    if folder in _LIBRARIES:
        return _LIBRARIES[folder]
    loaded = {
        name: ctypes.CDLL(str(next(folder.glob(f"{name}.*so"))), ctypes.RTLD_GLOBAL)
        for name in ("libggml-base", "libggml", "libllama")
    }
    loaded["libggml"].ggml_backend_load_all_from_path.argtypes = [c_char_p]
    library = loaded["libllama"]
    library.llama_log_set(_SILENT, None)
    loaded["libggml-base"].ggml_log_set(_SILENT, None)
    loaded["libggml"].ggml_backend_load_all_from_path(str(folder).encode())
    library.llama_backend_init()
    declared: dict[str, tuple[Any, list[Any]]] = {
        "llama_model_default_params": (_ModelParams, []),
        "llama_context_default_params": (_ContextParams, []),
        "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParams]),
        "llama_model_free": (None, [c_void_p]),
        "llama_model_get_vocab": (c_void_p, [c_void_p]),
        "llama_vocab_n_tokens": (c_int32, [c_void_p]),
        "llama_init_from_model": (c_void_p, [c_void_p, _ContextParams]),
        "llama_free": (None, [c_void_p]),
        "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
        "llama_get_memory": (c_void_p, [c_void_p]),
        "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
        "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]),
        "llama_batch_free": (None, [_Batch]),
        "llama_model_quantize_default_params": (_QuantizeParams, []),
        "llama_model_quantize": (c_uint32, [c_char_p, c_char_p, POINTER(_QuantizeParams)]),
        "llama_decode": (c_int32, [c_void_p, _Batch]),
        "llama_get_logits": (c_void_p, [c_void_p]),
    }
    for name, (result, arguments) in declared.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return _LIBRARIES.setdefault(folder, library)


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)(lambda level, text, own: None)
