"""How much gets done per second, of late."""

FADING = 0.9  # what each measurement weighs beside the next: the last ten or so count


class Rate:
    """Amounts and the seconds that they took, older ones fading. A large amount weighs more than a small one."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Take down one measurement."""
        self._amount = self._amount * FADING + amount
        self._seconds = self._seconds * FADING + seconds

    @property
    def per_s(self) -> float | None:
        """The amount per second; None while nothing has been measured."""
        return self._amount / self._seconds if self._seconds > 0 else None
