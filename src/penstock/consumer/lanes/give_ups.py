"""Give-ups that were asked for: somebody wants the message that holds a partition in its dead letters, now.

Any thread asks; only the holder of the message's lane acts, for only it may touch a parked key. A request is asked
before the key is woken, and a holder looks for one whenever a parked key was woken. Its `outcome` decides who comes
first: the holder has it running, or who asked has cancelled it. So it is carried out once or never, and who asked knows
which.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.consumer.assignments import Assignment

Place = tuple[Assignment, int]


@dataclass(slots=True, eq=False)
class GiveUp:
    """A request for the message at a place, to be written to a dead-letter topic."""

    place: Place
    topic: str
    #: Running when the message is on its way; then why the topic has it not, or None where it has.
    outcome: Future[str | None] = field(default_factory=Future)


class GiveUps:
    """The requests that nobody has acted on yet. Thread-safe: operations of a `dict` are atomic."""

    def __init__(self) -> None:
        self._asked: dict[Place, GiveUp] = {}

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, place: Place, topic: str) -> GiveUp:
        """Ask for a message; its key is to be woken afterwards. Two who ask for the same share one request."""
        return self._asked.setdefault(place, GiveUp(place, topic))

    def is_asked(self, topic: str, partition: int, offset: int) -> bool:
        """Tell whether a message is asked for, of this incarnation of its partition or another. Any thread."""
        place = (topic, partition, offset)
        # A copy, made in one step: others ask and take meanwhile.
        return any((wanted.topic, wanted.partition, at) == place for wanted, at in list(self._asked))

    def take(self, place: Place) -> GiveUp | None:
        """Return the request for a message, which is the caller's then. By the holder of its lane."""
        asked = self._asked.pop(place, None)
        return asked if asked is not None and asked.outcome.set_running_or_notify_cancel() else None

    def withdraw(self, up: GiveUp) -> bool:
        """Take a request back; return whether nobody has acted on it, and nobody will."""
        if not up.outcome.cancel():
            return False
        if self._asked.get(up.place) is up:
            self._asked.pop(up.place, None)
        return True
