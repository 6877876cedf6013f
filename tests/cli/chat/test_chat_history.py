"""Questions join a conversation with their answers, and nothing gets lost."""

import json
from pathlib import Path

from quire.cli.chat.chat_history import ChatHistory, Exchange


def roles(conversation: ChatHistory) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages()]


def test_messages_alternate_after_the_system_message() -> None:
    conversation = ChatHistory("be brief")
    conversation.keep(Exchange("q1", "a1"))
    conversation.keep(Exchange("q2", "a2"))
    said = [("system", "be brief"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
    assert roles(conversation) == said
    assert [message["content"] for message in conversation.messages("q3")][-2:] == ["a2", "q3"]
    assert roles(conversation) == said


def test_last_exchange_can_be_replaced() -> None:
    conversation = ChatHistory()
    conversation.keep(Exchange("q1", "a1"))
    conversation.keep(Exchange("q2", "a2"))
    assert [message["content"] for message in conversation.messages("q2", instead_of_last=True)] == [
        "q1", "a1", "q2",
    ]  # fmt: skip
    conversation.keep(Exchange("q2", "better"), instead_of_last=True)
    assert roles(conversation)[-2:] == [("user", "q2"), ("assistant", "better")]
    assert len(conversation.exchanges) == 2


def test_reset_keeps_the_system_message_and_the_open_question() -> None:
    conversation = ChatHistory("be brief", unanswered="too long?")
    conversation.exchanges.append(Exchange("q", "a"))
    conversation.reset()
    assert roles(conversation) == [("system", "be brief"), ("user", "too long?")]


def test_an_answer_settles_the_open_question() -> None:
    conversation = ChatHistory(unanswered="q")
    conversation.keep(Exchange("q", "a"))
    assert roles(conversation) == [("user", "q"), ("assistant", "a")]


def test_file_has_a_message_per_line(tmp_path: Path) -> None:
    conversation = ChatHistory("日本")
    conversation.keep(Exchange("a\nb", "\x1b[0m"))
    assert conversation.save(tmp_path / "chat.jsonl") == 3
    lines = (tmp_path / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == conversation.messages()
    assert "日本" in lines[0]


def test_images_are_in_front_of_the_first_question() -> None:
    conversation = ChatHistory("be brief", images=("data:image/png;base64,aGk=",))
    assert conversation.messages() == [{"role": "system", "content": "be brief"}]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    first = {"role": "user", "content": [picture, {"type": "text", "text": "q1"}]}
    assert conversation.messages("q1")[1:] == [first]
    conversation.keep(Exchange("q1", "a1"))
    assert conversation.messages("q2")[1:] == [
        first, {"role": "assistant", "content": "a1"}, {"role": "user", "content": "q2"},
    ]  # fmt: skip
