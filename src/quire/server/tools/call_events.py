"""Events of one output's calls, numbered."""

from quire.server.tools.output_events import Arguments, CallBegan, CallEnded, Event


class CallEvents:
    """Appends the events of calls; one call is open at a time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.num_calls = 0
        self._complete: list[int] = []  # calls with closed arguments, and no end emitted yet
        self._has_arguments = False

    def begin(self, name: str) -> None:
        """Begin the next call."""
        self.events.append(CallBegan(self.num_calls, name))
        self.num_calls += 1
        self._has_arguments = False

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        self.events.append(Arguments(self.num_calls - 1, text))
        self._has_arguments = True

    def complete(self) -> None:
        """Note that the arguments of the call that began last are closed; none are `{}`."""
        if not self._has_arguments:
            self.arguments("{}")
        self._complete.append(self.num_calls - 1)

    def end(self) -> None:
        """End the calls with closed arguments."""
        self.events += [CallEnded(index) for index in self._complete]
        self._complete.clear()

    def abandon(self) -> None:
        """Leave the calls that have no end yet without one."""
        self._complete.clear()
