"""Events of a parsed output: all that renderers of HTTP formats see of it.

One output gives one sequence of events. Texts of consecutive events of one kind (and call) are concatenated; a
sequence of pieces of any size gives the same concatenation.
"""

from typing import NamedTuple


class Content(NamedTuple):
    """A piece of the answer."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the reasoning, without its markers."""

    text: str


class CallBegan(NamedTuple):
    """The start of a tool call: emitted once, as soon as its name is known.

    `index` counts the calls of the output from 0. Calls begin in order, but an output may end inside a call.
    """

    index: int  # type: ignore[assignment]  # of tuple.index
    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of call `index`: JSON text, `{}` if the call has none.

    Pieces are emitted as they come. JSON that the model wrote is passed on as it is; other notations are translated.
    """

    index: int  # type: ignore[assignment]  # of tuple.index
    text: str


class CallEnded(NamedTuple):
    """The end of call `index`: its arguments are a closed JSON object.

    A call without this event is incomplete: the output was cut, or the arguments are no JSON. Calls of formats that
    write a list of calls end together, with the list.
    """

    index: int  # type: ignore[assignment]  # of tuple.index


Event = Content | Reasoning | CallBegan | Arguments | CallEnded


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
