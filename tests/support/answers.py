"""What a request came to, in a form that can be compared bit for bit."""

from typing import NamedTuple

from quire import RequestOutput


class Answer(NamedTuple):
    """Tokens of one branch, and the logprob of every candidate at every position, as exact hexadecimal floats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, str], ...], ...]
    finish_reason: str | None


def answers_of(output: RequestOutput) -> list[Answer]:
    """The branches of a finished request."""
    return [
        Answer(
            tuple(branch.token_ids),
            tuple(
                tuple((token, entry.logprob.hex()) for token, entry in position.items())
                for position in branch.logprobs or []
            ),
            branch.finish_reason,
        )
        for branch in output.outputs
    ]
