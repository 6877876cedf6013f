"""Digest of a model's files: names, sizes and the ends of each, so that ranks notice when they read other models."""

import hashlib
from pathlib import Path

END_BYTES = 1 << 16
SUFFIXES = (".json", ".safetensors", ".gguf")


def model_digest(path: Path) -> str:
    """Return the digest of a folder's weights and configuration, or of a file."""
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
    found = hashlib.sha256()
    for each in files:
        with each.open("rb") as file:
            size = file.seek(0, 2)
            found.update(f"{each.name} {size}\n".encode(errors="replace"))
            for start in (0, max(0, size - END_BYTES)):
                file.seek(start)
                found.update(file.read(END_BYTES))
    return found.hexdigest()
