"""One answer as it comes in: its text, and how fast it came."""

from dataclasses import dataclass, field

from quire.cli.chat.back_end import Update


@dataclass(slots=True)
class Answer:
    """What has come since the question was asked. Times are seconds on one monotonic clock."""

    asked_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_pieces: int = 0                       # updates that brought text
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    finish_reason: str | None = None
    is_whole: bool = False                    # the back end came to its end; else it failed or was stopped
    _pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def take(self, update: Update, now_s: float) -> None:
        """Add what is new. A count that an update does not know stays as it was."""
        if update.text:
            self._pieces.append(update.text)
            self.num_pieces += 1
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
        if update.num_prompt_tokens is not None:
            self.num_prompt_tokens = update.num_prompt_tokens
        if update.num_tokens is not None:
            self.num_tokens = update.num_tokens
        if update.finish_reason is not None:
            self.finish_reason = update.finish_reason

    def summary(self) -> str:
        """Return counts and times in one line. Without a count of tokens, pieces of text stand in for them."""
        if self.first_s is None or self.last_s is None:
            return "the last answer has no text"
        unit, count = ("tokens", self.num_tokens) if self.num_tokens is not None else ("pieces", self.num_pieces)
        parts = [
            f"{count} {unit} in {self.last_s - self.asked_s:.2f} s",
            f"the first after {self.first_s - self.asked_s:.3f} s",
        ]
        if count > 1 and self.last_s > self.first_s:
            parts.append(f"then {(count - 1) / (self.last_s - self.first_s):.1f} {unit}/s")
        if self.num_prompt_tokens is not None:
            parts.append(f"prompt of {self.num_prompt_tokens} tokens")
        if self.num_tokens is None:
            parts.append("tokens were not counted")
        return ", ".join([*parts, f"ended by {self.finish_reason or 'interruption'}"])
