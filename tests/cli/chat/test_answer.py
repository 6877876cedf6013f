"""What `/stats` says about an answer."""

from quire.cli.chat.chat_history import ChatAnswer, Update


def answer_of(*updates: Update) -> ChatAnswer:
    answer = ChatAnswer(asked_s=10.0)
    for index, update in enumerate(updates):
        answer.take(update, 10.25 + 0.5 * index)
    return answer


def test_counts_of_the_server_are_reported() -> None:
    answer = answer_of(Update("a"), Update("b"), Update("c", finish_reason="stop"), Update("", 7, 11))
    assert answer.text == "abc"
    assert answer.summary() == (
        "11 tokens in 1.25 s, the first after 0.250 s, then 10.0 tokens/s, prompt of 7 tokens, ended by stop"
    )


def test_pieces_stand_in_for_tokens_that_nobody_counted() -> None:
    assert answer_of(Update("a"), Update("b")).summary() == (
        "2 pieces in 0.75 s, the first after 0.250 s, then 2.0 pieces/s, tokens were not counted, ended by interruption"
    )


def test_one_token_has_no_rate() -> None:
    answer = answer_of(Update("a", 3, 1, "length"))
    assert answer.summary() == "1 tokens in 0.25 s, the first after 0.250 s, prompt of 3 tokens, ended by length"


def test_answer_without_text_says_so() -> None:
    assert answer_of(Update("", 3, 1, "stop")).summary() == "the last answer has no text"
