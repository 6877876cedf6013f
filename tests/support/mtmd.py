"""llama.cpp's encoder of images by its C interface, as `tools/mtmd/mtmd.h` of version 0.5.0 has it.

No package has the library: findings/llama_cpp_llava_class_token.sh builds it, linked with a package's libraries.
"""

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.llama_cpp import LlamaCpp

_IMAGE_CHUNK = 1


class _Params(Structure):
    _fields_ = [
        ("use_gpu", c_bool), ("device", c_void_p), ("print_timings", c_bool), ("n_threads", c_int32),
        ("image_marker", c_char_p), ("media_marker", c_char_p), ("flash_attn_type", c_int32), ("warmup", c_bool),
        ("image_min_tokens", c_int32), ("image_max_tokens", c_int32), ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p), ("batch_max_tokens", c_int32), ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    ]  # fmt: skip


class _Text(Structure):
    _fields_ = [("text", c_char_p), ("text_len", c_size_t), ("add_special", c_bool), ("parse_special", c_bool)]


class Mtmd:
    """An encoder of images in a GGUF file, beside a loaded text model."""

    def __init__(self, library: Path, model: LlamaCpp, projector: Path, num_threads: int) -> None:
        self._library = loaded = ctypes.CDLL(str(library))
        declared: dict[str, tuple[Any, list[Any]]] = {
            "mtmd_context_params_default": (_Params, []),
            "mtmd_init_from_file": (c_void_p, [c_char_p, c_void_p, _Params]),
            "mtmd_free": (None, [c_void_p]),
            "mtmd_default_marker": (c_char_p, []),
            "mtmd_bitmap_init": (c_void_p, [c_uint32, c_uint32, c_char_p]),
            "mtmd_input_chunks_init": (c_void_p, []),
            "mtmd_input_chunks_size": (c_size_t, [c_void_p]),
            "mtmd_input_chunks_get": (c_void_p, [c_void_p, c_size_t]),
            "mtmd_input_chunk_get_type": (c_int32, [c_void_p]),
            "mtmd_input_chunk_get_n_tokens": (c_size_t, [c_void_p]),
            "mtmd_tokenize": (c_int32, [c_void_p, c_void_p, POINTER(_Text), POINTER(c_void_p), c_size_t]),
            "mtmd_encode_chunk": (c_int32, [c_void_p, c_void_p]),
            "mtmd_get_output_embd": (POINTER(c_float), [c_void_p]),
        }
        for name, (result, arguments) in declared.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        params = loaded.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.warmup, params.print_timings = False, num_threads, True, False
        self._context = loaded.mtmd_init_from_file(str(projector).encode(), model._model, params)
        assert self._context, projector

    def close(self) -> None:
        """Free the encoder."""
        self._library.mtmd_free(self._context)

    def chunk(self, pixels: NDArray[np.uint8]) -> Any:  # noqa: ANN401 (an address)
        """Return an image [height, width, 3] as it resizes and normalizes it, for `encode`."""
        library, marker = self._library, self._library.mtmd_default_marker()
        bitmap = library.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], pixels.tobytes())
        chunks = library.mtmd_input_chunks_init()
        text = _Text(marker, len(marker), False, True)
        status = library.mtmd_tokenize(self._context, chunks, ctypes.byref(text), (c_void_p * 1)(bitmap), 1)
        assert status == 0, status
        found = [library.mtmd_input_chunks_get(chunks, at) for at in range(library.mtmd_input_chunks_size(chunks))]
        (image,) = (each for each in found if library.mtmd_input_chunk_get_type(each) == _IMAGE_CHUNK)
        return image

    def encode(self, chunk: Any, width: int) -> NDArray[np.float32]:  # noqa: ANN401 (an address)
        """Return the rows of an image, [num_tokens, width] in the library's memory."""
        status = self._library.mtmd_encode_chunk(self._context, chunk)
        assert status == 0, status
        num_rows = self._library.mtmd_input_chunk_get_n_tokens(chunk)
        return np.ctypeslib.as_array(self._library.mtmd_get_output_embd(self._context), (num_rows, width))
