"""Chat templates of a start, their variables, and usage without asking: of servers and of `LLM`."""

import json
from pathlib import Path

from quire import LLM, SamplingParams
from support.server import running_server

TEMPLATE = "{{ word }}:{% for message in messages %}{{ message.content }};{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}


def test_server_renders_the_given_template_with_its_variables(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    arguments = (
        "--chat-template", str(tmp_path / "template.jinja"), "--default-chat-template-kwargs.word", "def",
        "--enable-force-include-usage",
    )  # fmt: skip
    with running_server(str(demo_model), *arguments) as server:
        def prompt(body: dict[str, object]) -> str:
            answer = server.post("/v1/chat/completions", CHAT | body | {"return_token_ids": True}).json()
            text: str = server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
            return text

        assert prompt({}) == "def:hi;"
        assert prompt({"chat_template_kwargs": {"word": "if"}}) == "if:hi;"
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a", "max_tokens": 1})):
            for options in ({}, {"stream_options": {"include_usage": False}}):
                stream = server.post(path, body | {"stream": True} | options).text
                lines = stream.splitlines()
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
                last = chunks[-1]
                assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 1)
                assert chunks[-2]["usage"]["completion_tokens"] == 1
                assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def test_llm_renders_the_given_template(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    for template in (TEMPLATE, tmp_path / "template.jinja"):
        with LLM(demo_model, chat_template=template, max_model_len=64) as llm:
            (output,) = llm.chat(CHAT["messages"], SamplingParams(max_tokens=1), use_tqdm=False)
            assert output.prompt == ":hi;"
