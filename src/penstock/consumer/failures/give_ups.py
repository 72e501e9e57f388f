"""Give-ups that were asked for: somebody wants the message that holds a partition in its dead letters, now.

Any thread asks; only the holder of the message's lane acts, for only it may touch a parked key. Both meet in one
`dict`, whose operations are atomic: the holder takes a request, or who asked withdraws it, and whichever comes first
has it. So a request is carried out once or never, and who asked knows which. It is asked before the key is woken, and a
holder looks at it whenever a parked key was woken: so the visit that the waking leads to does not miss it. A request
whose message is no head of a parked key any more is found by nobody, and withdrawn by who asked.
"""

from __future__ import annotations

import threading

from penstock.consumer.assignments import Assignment

Place = tuple[Assignment, int]


class GiveUp:
    """A request. `refusal` is written before `ended` is set, both by the holder of the lane or by the poll thread."""

    __slots__ = ("ended", "place", "refusal", "taken", "topic")

    def __init__(self, place: Place, topic: str) -> None:
        self.place = place
        #: The dead-letter topic.
        self.topic = topic
        #: Set when the message is on its way there.
        self.taken = threading.Event()
        #: Set when that topic has it, or never will.
        self.ended = threading.Event()
        #: Why it has not; None where it has.
        self.refusal: str | None = None

    def end(self, refusal: str | None = None) -> None:
        """Tell who asked what came of it. Once."""
        self.refusal = refusal
        self.ended.set()


class GiveUps:
    """The requests that nobody has acted on yet. Thread-safe."""

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
        return self._asked.pop(place, None)

    def withdraw(self, up: GiveUp) -> bool:
        """Take a request back; return whether nobody has acted on it, and nobody will."""
        if up.taken.is_set():
            return False
        return self._asked.pop(up.place, None) is up
