"""What a request came to, in a form that can be compared: bit for bit, or with --device cuda by the margin rule."""

from dataclasses import astuple, dataclass, field

from quire import RequestOutput
from quire.core.pooling import BeamTask
from support.margin import Asked, asked_for, beam_score, beyond_margin


@dataclass(frozen=True, eq=False)
class Answer:
    """Tokens of one branch, and the logprob of every candidate at every position, as exact hexadecimal floats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, str], ...], ...]
    finish_reason: str | None
    cumulative_logprob: str | None = None
    index: int = 0
    asked: Asked | None = field(default=None, repr=False)  # None: compared to the bit

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        if self.asked is None or other.asked is None:
            return astuple(self)[:4] == astuple(other)[:4]
        if isinstance(self.asked.request.task, BeamTask):
            return self.has_right_score() and other.has_right_score()
        if self.token_ids == other.token_ids:
            return self.finish_reason == other.finish_reason and _has_near_logprobs(self, other, self.asked.margin)
        return not any(each.tokens_beyond_margin() for each in (self, other))

    __hash__ = None  # type: ignore[assignment]

    def tokens_beyond_margin(self, margin: float | None = None) -> list[int]:
        """Return the places of tokens that the margin rule does not allow."""
        assert self.asked is not None
        return beyond_margin(self.asked, self.index, list(self.token_ids), margin)

    def has_right_score(self) -> bool:
        """Whether a beam's score is that of its tokens."""
        assert self.asked is not None
        assert self.cumulative_logprob is not None
        score = beam_score(self.asked, list(self.token_ids))
        return _is_near(self.cumulative_logprob, score.hex(), self.asked.margin * len(self.token_ids))


def have_equal_prompt_logprobs(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether the prompts of two finished requests have the same scores, as answers are compared."""
    _, asked = asked_for.get(id(one), (None, None))
    if asked is None or one.prompt_logprobs is None or other.prompt_logprobs is None:
        return one.prompt_logprobs == other.prompt_logprobs
    places = zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
    pairs = ((ours or {}, theirs or {}) for ours, theirs in places)
    return all(
        abs(ours[token].logprob - theirs[token].logprob) <= asked.margin
        for ours, theirs in pairs
        for token in ours.keys() & theirs
    )


def answers_of(output: RequestOutput) -> list[Answer]:
    """The branches of a finished request."""
    _, asked = asked_for.get(id(output), (None, None))
    return [
        Answer(
            tuple(branch.token_ids),
            tuple(
                tuple((token, entry.logprob.hex()) for token, entry in position.items())
                for position in branch.logprobs or []
            ),
            branch.finish_reason,
            None if branch.cumulative_logprob is None else branch.cumulative_logprob.hex(),
            index,
            asked,
        )
        for index, branch in enumerate(output.outputs)
    ]


def _has_near_logprobs(one: Answer, other: Answer, margin: float) -> bool:
    """Whether what both give a logprob to has nearly the same one."""
    pairs = zip(map(dict, one.logprobs), map(dict, other.logprobs), strict=True)
    return all(_is_near(ours[token], theirs[token], margin) for ours, theirs in pairs for token in ours.keys() & theirs)


def _is_near(one: str | None, other: str | None, margin: float) -> bool:
    if one is None or other is None:
        return one is other
    return abs(float.fromhex(one) - float.fromhex(other)) <= margin
