"""Moving average of a rate, per second."""

FADING = 0.9  # weight of each measurement relative to the next: about the last ten count


class Rate:
    """Amounts and the seconds that they took, with exponential decay. Large amounts weigh more than small ones."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Add one measurement."""
        self._amount = self._amount * FADING + amount
        self._seconds = self._seconds * FADING + seconds

    @property
    def per_s(self) -> float | None:
        """The amount per second; None before the first measurement."""
        return self._amount / self._seconds if self._seconds > 0 else None
