"""The tokenizer does what transformers does for the same folder, and says clearly what is wrong with a bad one."""

import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError, ModelError
from quire.text.text_settings import tokenizer_file
from quire.text.tokenizer import Tokenizer
from support import small_tokenizers
from support.text_tokenizers import REAL, SMALL, expected_ids

TEXTS = [
    "Hello world",
    " leading, trailing ",
    "naïve café 日本語 😀👩‍👩‍👧 e\u0301",
    "def f(x):\n\treturn x**2  # ok\n\n",
    "<s>spelled </s> <|endoftext|>",
    "",
]


def small_folder(folder: Path, **config: object) -> Path:
    return small_tokenizers.save(small_tokenizers.byte_level(), folder, **config)


@pytest.mark.parametrize("tokenizer_folder", [*SMALL, *REAL], indirect=True)
def test_encodes_and_decodes_like_transformers(tokenizer_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries that transformers imports
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    ours = Tokenizer.from_folder(tokenizer_folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
            form = theirs(text, add_special_tokens=special, return_token_type_ids=False)
            assert ours(text, add_special_tokens=special) == dict(form)
    assert ours(TEXTS) == dict(theirs(TEXTS, return_token_type_ids=False))
    assert ours(TEXTS).input_ids == [ours(text).input_ids for text in TEXTS]
    assert ours(TEXTS[0]).attention_mask == theirs(TEXTS[0]).attention_mask
    last = ours.encode("a")[-1]
    assert ours.decode(last) == theirs.decode(last, skip_special_tokens=True)
    assert ours.named_tokens.get("bos_token") == theirs.bos_token
    assert ours.named_tokens.get("eos_token") == theirs.eos_token
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_token_ids >= set(theirs.all_special_ids)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


@pytest.mark.parametrize("tokenizer_folder", REAL[:-1], indirect=True, ids=REAL[:-1])
def test_ids_of_known_texts(tokenizer_folder: Path, request: pytest.FixtureRequest) -> None:
    tokenizer, expected = Tokenizer.from_folder(tokenizer_folder), expected_ids()
    name = request.node.callspec.id
    for key, text in expected["texts"].items():
        assert tokenizer.encode(text, add_special_tokens=False) == expected[name][key]
        assert tokenizer.decode(expected[name][key]) == text


@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_encoded_or_decoded(tmp_path: Path, direction: str) -> None:
    tokenizer, text = Tokenizer.from_folder(small_folder(tmp_path)), "a long text " * 100_000
    given: Any = text if direction == "encode" else tokenizer.encode(text)
    may_run, has_run = threading.Event(), threading.Event()

    def run() -> None:
        may_run.wait()
        has_run.set()

    other, interval_s = threading.Thread(target=run), sys.getswitchinterval()
    other.start()
    sys.setswitchinterval(3600)  # the other thread runs when this one lets it, and not else
    try:
        may_run.set()
        while not has_run.is_set():  # once, unless the machine has stopped the other thread for so long
            getattr(tokenizer, direction)(given)
    finally:
        sys.setswitchinterval(interval_s)
        other.join()


def test_special_tokens_are_skipped_only_when_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(small_folder(tmp_path))
    ids = tokenizer.encode("the</s> end", add_special_tokens=False)
    assert tokenizer.encode("</s>", add_special_tokens=False)[0] in ids
    assert tokenizer.decode(ids) == "the end"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the</s> end"


def test_configuration_makes_tokens_special_but_adds_none(tmp_path: Path) -> None:
    folder = small_folder(tmp_path, additional_special_tokens=["the", {"content": "a"}, "<not in the vocabulary>"])
    tokenizer = Tokenizer.from_folder(folder)
    plain = Tokenizer.from_folder(small_folder(tmp_path / "plain"))
    the = plain.encode("the")[0]
    assert the in tokenizer.special_token_ids - plain.special_token_ids
    assert tokenizer.vocab_size == plain.vocab_size
    assert tokenizer.decode([the]) == ""


def test_special_tokens_map_is_read_where_the_configuration_is_silent(tmp_path: Path) -> None:
    folder = small_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "the"}


def test_named_token_out_of_the_vocabulary_is_known_by_its_name_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(small_folder(tmp_path, bos_token="[BOS]", eos_token=None))
    assert tokenizer.named_tokens == {"bos_token": "[BOS]"}
    assert len(tokenizer.encode("[BOS]")) > 1


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_level()
    plain = backend.encode("the quick brown fox").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=40)
    tokenizer = Tokenizer.from_folder(small_tokenizers.save(backend, tmp_path))
    assert tokenizer.encode("the quick brown fox") == plain


@pytest.mark.parametrize("tokenizer_folder", SMALL, indirect=True)
def test_token_text_reads_as_inside_a_text(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    first, *rest = tokenizer.encode("the the stop", add_special_tokens=False)
    texts = [tokenizer.token_text(token) for token in rest]
    assert "".join(texts).replace("\u2581", " ") == " the stop"
    assert tokenizer.token_text(tokenizer.encode("</s>", add_special_tokens=False)[-1]).strip() == "</s>"
    assert tokenizer.token_text(first) in ("the", " the")


def test_token_text_of_half_a_character_and_of_an_unknown_id(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(small_folder(tmp_path))
    emoji = tokenizer.encode("🦊")
    assert len(emoji) > 1
    assert {tokenizer.token_text(token) for token in emoji} == {"\ufffd"}
    assert tokenizer.token_text(tokenizer.vocab_size + 7) == ""


def test_text_with_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(small_folder(tmp_path))
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.encode("a\ud800b")
    assert caught.value.param == "prompt"


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folder_without_tokenizer_is_told_from_a_broken_one(tmp_path: Path) -> None:
    assert tokenizer_file(tmp_path) is None
    with pytest.raises(ModelError, match=r"no file tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b'"text"', b"{" * 100_000, b'{"model": {"type": "BPE"}}'])
def test_broken_tokenizer_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def make_loading_panic(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["continuing_subword_prefix"] = "longer than any token"


def make_encoding_panic(tokenizer: dict[str, Any]) -> None:
    tokenizer["post_processor"]["special_tokens"]["<s>"]["id"] = "<other>"
    tokenizer["post_processor"]["special_tokens"] = {"<other>": tokenizer["post_processor"]["special_tokens"]["<s>"]}


@pytest.mark.parametrize("spoil", [make_loading_panic, make_encoding_panic])
def test_file_that_the_library_chokes_on_is_named(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(small_tokenizers.byte_fallback().to_str())
    spoil(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    capfd.readouterr()  # the library's own words about it


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_broken_settings_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = small_folder(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "config",
    [{"bos_token": 5}, {"eos_token": ["</s>"]}, {"additional_special_tokens": 7}, {"chat_template": 1}],
)
def test_settings_of_wrong_types_are_no_crash(tmp_path: Path, config: dict[str, object]) -> None:
    tokenizer = Tokenizer.from_folder(small_folder(tmp_path, **config))
    assert tokenizer.decode(tokenizer.encode("the stop")) == "the stop"
    assert tokenizer.chat_template is None


# --- chat templates ---------------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hi"}]


def test_chat_template_names_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(small_folder(tmp_path, chat_template=small_tokenizers.CHAT_TEMPLATE))
    assert tokenizer.apply_chat_template(HELLO) == "<s>user: hi\nassistant:"
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == "<s>user: hi\n"


CONFIGURED: dict[str, Any] = {
    "none": None,
    "text": "configured",
    "object": {"default": "configured", "tool_use": "configured for tools"},
    "list": [{"name": "tool_use", "template": "configured for tools"}, {"name": "default", "template": "configured"}],
    "others, too": [{"name": "rag", "template": "r"}, {"name": "default", "template": "configured"}],
    "tools alone": [{"name": "tool_use", "template": "configured for tools"}],
}
TEMPLATE_FILES = {
    "chat_template.jinja": "file",
    "additional_chat_templates/tool_use.jinja": "file for tools",
    "additional_chat_templates/default.jinja": "additional file",
    "chat_template.json": json.dumps({"chat_template": "JSON"}),
}


@pytest.mark.parametrize("configured", CONFIGURED)
def test_template_is_the_one_that_transformers_chooses(tmp_path: Path, configured: str) -> None:
    transformers = pytest.importorskip("transformers")
    tools = [{"type": "function", "function": {"name": "f"}}]
    for number in range(1 << len(TEMPLATE_FILES)):
        folder = small_folder(tmp_path / str(number), chat_template=CONFIGURED[configured])
        (folder / "additional_chat_templates").mkdir()
        files = {name: text for bit, (name, text) in enumerate(TEMPLATE_FILES.items()) if number >> bit & 1}
        for name, text in files.items():
            (folder / name).write_text(text)
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        ours = Tokenizer.from_folder(folder).chat_templates
        for given in (None, tools):
            try:
                expected = reference.get_chat_template(None, given)
            except ValueError:  # no template, or none without tools, for which ours has another
                expected = chosen_instead(configured, files)
            chosen = ours.get("tool_use" if given else "default", ours.get("default"))
            assert chosen == expected, (files, given)


def chosen_instead(configured: str, files: dict[str, str]) -> str | None:
    """Return the template of conversations without tools where transformers has one for tools or none."""
    if "additional_chat_templates/tool_use.jinja" in files:
        return "file for tools" if configured in ("none", "tools alone") else "configured"
    if configured == "tools alone":
        return "configured for tools"
    return "JSON" if "chat_template.json" in files else None


TOOL_TEMPLATES = {"default": "d {{ messages[0].content }}", "tool_use": "{{ tools | tojson }}"}


@pytest.mark.parametrize("place", ["list", "object", "files", "file beside the configuration"])
def test_template_for_tools_is_used_with_tools(tmp_path: Path, place: str) -> None:
    config: Any = [{"name": name, "template": template} for name, template in {**TOOL_TEMPLATES, "rag": "r"}.items()]
    config = {"list": config, "object": TOOL_TEMPLATES, "files": "older"}.get(place, TOOL_TEMPLATES["default"])
    folder = small_folder(tmp_path, chat_template=config)
    if place.startswith("file"):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_TEMPLATES["tool_use"])
    if place == "files":
        (folder / "chat_template.jinja").write_text(TOOL_TEMPLATES["default"])
    tokenizer = Tokenizer.from_folder(folder)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.chat_templates == TOOL_TEMPLATES
    assert tokenizer.apply_chat_template(HELLO) == "d hi"
    assert tokenizer.apply_chat_template(HELLO, tools=tools) == json.dumps(tools)
    tokenizer.use_chat_template("given")
    assert tokenizer.chat_templates == {"default": "given"}


def test_templates_without_a_default_are_none(tmp_path: Path) -> None:
    folder = small_folder(tmp_path, chat_template=[{"name": "rag", "template": "t"}])
    assert Tokenizer.from_folder(folder).chat_templates == {}


@pytest.mark.parametrize(
    "others",
    [{"image_token": "<image>", "extra_special_tokens": {"boi_token": "<boi>"}},
     {"model_specific_special_tokens": {
         "image_token": "<image>", "boi_token": {"__type": "AddedToken", "content": "<boi>"},
     }}],
    ids=", ".join,
)  # fmt: skip
def test_other_special_tokens_are_variables_as_in_transformers(tmp_path: Path, others: dict[str, Any]) -> None:
    names = ("bos_token", "image_token", "boi_token", "list_token", "no_token")
    template = "".join(f"{{{{ {name} }}}}|" for name in names)
    folder = small_folder(tmp_path, chat_template=template, list_token=["<s>"], no_token=None, **others)
    assert Tokenizer.from_folder(folder).apply_chat_template(HELLO) == "<s>|<image>|<boi>|||"
    theirs = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    assert theirs.apply_chat_template(HELLO, tokenize=False) == "<s>|<image>|<boi>|||"


def test_given_template_is_probed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_folder(small_folder(tmp_path))
    with caplog.at_level("INFO", "quire.text.chat_template"):
        for _ in range(3):
            assert tokenizer.apply_chat_template(HELLO, chat_template="{{ messages[0].content }}") == "hi"
    assert len(caplog.messages) == 1


def test_model_without_template_refuses_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(small_folder(tmp_path))
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("tokenizer_folder", ["qwen2"], indirect=True)
def test_real_chat_template_renders_like_transformers(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    ours = Tokenizer.from_folder(tokenizer_folder)
    talk = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "日本 <b>?"}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(
        talk, add_generation_prompt=True, tokenize=False
    )
