"""The demo model's corpus: the standard library of the running interpreter, as documents and as tokens.

Documents are whole modules with a sample of the test-suite, short functions and classes alone (so that a prompt like
`def ` continues to the end of a function and stops there), and chats made from docstrings in the demo's chat template.
"""

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
END, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2; END opens and closes a text
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Tables and generated files teach a small model nothing but long lists.
SKIPPED_DIRS = {"site-packages", "idlelib", "encodings", "pydoc_data", "__phello__"}
SKIPPED_FILES = {"entities.py", "stringprep.py", "keysym.py", "token.py", "pygram.py"}
MAX_FILE_CHARS = 150_000
TEST_SHARE = 0.2  # tests outweigh the library and are full of near copies
MEAN_PIECE_CHARS = 150
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_modules(rng: random.Random) -> list[str]:
    """Return the sources of the standard library, and of a fixed share of its tests, in a seeded order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).parts
        if SKIPPED_DIRS & set(parts) or parts[0].startswith("config-") or path.name in SKIPPED_FILES:
            continue
        is_test = "test" in parts or "tests" in parts
        if is_test and rng.random() > TEST_SHARE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if 200 < len(text) <= MAX_FILE_CHARS and (text.isascii() or not is_test):
            texts.append(text.expandtabs().replace("\f", ""))
    rng.shuffle(texts)
    return texts


def definitions(module: str) -> Iterator[tuple[Definition, str, bool]]:
    """Yield each function and class of a module: its node, its dedented source, and whether it is at the top level."""
    try:
        tree = ast.parse(module)
    except (SyntaxError, ValueError):
        return
    lines = module.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
            yield node, source, node in tree.body


def chat(question: str, answer: str) -> str:
    """Format one exchange exactly as CHAT_TEMPLATE does, without the opening END."""
    return f"{CHAT_START}user\n{question}{CHAT_END}\n{CHAT_START}assistant\n{answer.strip()}{CHAT_END}\n"


def make_documents(modules: list[str], rng: random.Random) -> list[str]:
    """Return modules, short top-level definitions alone, and chats about documented functions."""
    documents = list(modules)
    for module in modules:
        for node, source, is_top_level in definitions(module):
            name, docstring = node.name, ast.get_docstring(node)
            if is_top_level and 3 <= source.count("\n") <= 80 and not name.lower().startswith("test"):
                documents.append(source)
            if isinstance(node, ast.ClassDef) or not docstring or name.startswith("__") or len(docstring) < 20:
                continue
            summary = docstring.split("\n\n")[0].replace("\n", " ").rstrip(".")
            if rng.random() < 0.5 and len(source) < 2000:
                requests = [f"Write a function {name}.", f"Write a function {name}: {summary}.",
                            f"Implement {name} in Python."]
                documents.append(chat(rng.choice(requests), source))
            elif len(docstring) < 1000:
                questions = [f"What does {name} do?", f"Explain the function {name}.", f"What is {name}?"]
                documents.append(chat(rng.choice(questions), docstring))
    return documents


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE of VOCAB entries, the special tokens first; encoding a prompt puts END before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END, CHAT_START, CHAT_END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str], rng: random.Random) -> list[np.ndarray]:
    """Return one uint16 array per document, END in front.

    Each text is encoded in pieces cut now and then at random, half of the cuts behind a space: prompts such as `def `
    end where no word ends, and a model that saw only whole-text encodings would never have met a lone space there.
    """
    pieces, owners = [], []
    for index, document in enumerate(documents):
        start = 0
        while start < len(document):
            stop = start + int(rng.expovariate(1 / MEAN_PIECE_CHARS)) + 1
            if rng.random() < 0.5:
                stop = (document.find(" ", stop) + 1) or len(document)
            if "<|" in document[max(0, stop - 14) : stop]:  # leave special tokens whole
                stop += 14
            pieces.append(document[start:stop])
            owners.append(index)
            start = stop
    tokens: list[list[int]] = [[0] for _ in documents]
    for owner, encoding in zip(owners, tokenizer.encode_batch_fast(pieces, add_special_tokens=False), strict=True):
        tokens[owner] += encoding.ids
    return [np.array(ids, dtype=np.uint16) for ids in tokens]
