"""Names of tokenizer files in a model folder, and what is said of a folder without one."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
TEKKEN_FILE = "tekken.json"
_FORMATS = ((TOKENIZER_FILE,), (SENTENCEPIECE_FILE,), (VOCAB_FILE, MERGES_FILE), (TEKKEN_FILE,))
_OTHER_FILES = ("*.model", "*.tiktoken", VOCAB_FILE, MERGES_FILE)  # what a folder may have instead


def tokenizer_file(folder: Path) -> str | None:
    """Return the name of the first file that the tokenizer of `folder` is read from, or None if it has none."""
    return next((names[0] for names in _FORMATS if all((folder / name).exists() for name in names)), None)


def missing_tokenizer(folder: Path) -> str:
    """Return, in words, what a folder without a tokenizer has instead, and what would help."""
    found = sorted({path.name for pattern in _OTHER_FILES for path in folder.glob(pattern)})
    instead = f"found only {', '.join(found)}" if found else "none of them is there"
    return (
        f"{folder} has no tokenizer, and --tokenizer names none. Needed is tokenizer.json, tokenizer.model, "
        f"vocab.json with merges.txt, or tekken.json; {instead}. "
        "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes tokenizer.json"
    )


def warn_missing_tokenizer(folder: Path) -> None:
    """Log that prompts can only be token ids, and what would help."""
    log.warning("prompts must be token ids, chats and texts are refused: %s", missing_tokenizer(folder))
