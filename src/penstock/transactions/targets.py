"""Which targets take messages now: topics that exist, less those that failed a moment ago.

A Kafka transaction fails as a whole, so a target that fails is left out of the next ones, and tried again after pauses
that grow: one message goes first. The list of topics is fetched by a thread of its own; nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

from penstock.errors import PenstockError

_log = logging.getLogger("penstock.transactions")

#: Seconds between two questions for the list of topics.
_LOOK_S = 1.0
#: Seconds until what failed is tried again: at first, and at last.
_FIRST_S = 0.5
_LAST_S = 30.0

#: Why a topic cannot take a message that nobody has heard of yet: the list that comes next may have it.
NOT_KNOWN = "is not known yet"


class Pauses:
    """What failed, each with a pause that grows from failure to failure. Used by one thread."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def fail(self, name: str, now: float) -> float:
        """Let something rest after a failure, and return for how many seconds."""
        _, last_s = self._until.get(name, (0.0, 0.0))
        pause_s = min(_LAST_S, 2 * last_s) if last_s else _FIRST_S
        self._until[name] = now + pause_s, pause_s
        return pause_s

    def rests(self, name: str, now: float) -> bool:
        """Tell whether it rests still."""
        return self._until.get(name, (0.0, 0.0))[0] > now

    def forget(self, name: str) -> None:
        """It is well again, or gone."""
        self._until.pop(name, None)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all but these."""
        kept = set(names)
        self._until = {name: pause for name, pause in self._until.items() if name in kept}

    def __contains__(self, name: object) -> bool:
        return name in self._until


class Targets:
    """The targets of one coordinator. Used by its thread, save for the looks.

    Args:
        ask: returns the partitions of every topic, or raises `PenstockError`; it may take seconds.
        name: what the names of the threads that ask end with.
    """

    def __init__(self, ask: Callable[[], Mapping[str, int]], name: str) -> None:
        self._ask = ask
        self._name = name
        # Replaced as a whole by the thread that asks, read by the coordinator's.
        self._counts: Mapping[str, int] = {}
        # Lists that arrived, changed or not; and by topic how many had, when it was first not found.
        self._lists = 0
        self._missed: dict[str, int] = {}
        self._asked = -_LOOK_S
        # Set while a thread asks, by the one that starts it, cleared by itself when it ends.
        self._asking = threading.Event()
        # Set when the first question had an answer, or none.
        self._heard = threading.Event()
        # Set by the thread that asks, cleared by the coordinator's.
        self._fresh = threading.Event()
        self._shut = Pauses()
        self._probed: set[str] = set()

    def takes(self, topic: str, partitions: int, now: float) -> str | None:
        """Say why a topic cannot take a message now, or None where it can.

        A topic that failed and is due for another try takes one message, and no more until that one's fate is known.

        Args:
            topic: the target.
            partitions: how many it must have, at least.
            now: monotonic seconds.
        """
        if self._counts.get(topic, 0) < partitions:
            self.look(now)
            # A list that was asked for before does not count: one may have been under way.
            if self._lists < self._missed.setdefault(topic, self._lists + 1 + self._asking.is_set()):
                return NOT_KNOWN
            return f"does not exist with {partitions} partitions or more; create it"
        if self._missed:
            self._missed.pop(topic, None)
        if topic in self._shut:
            if self._shut.rests(topic, now) or topic in self._probed:
                return "failed a moment ago; it is tried again"
            self._probed.add(topic)
        return None

    def failed(self, topic: str, now: float) -> float:
        """Leave a topic out for a time, and return for how many seconds. It may have been deleted: the list is old."""
        self._asked = -_LOOK_S
        self.look(now)
        return self._shut.fail(topic, now)

    def rests(self, topic: str, now: float) -> bool:
        """Tell whether a topic is left out still."""
        return self._shut.rests(topic, now)

    @property
    def probing(self) -> bool:
        """Whether a target is being tried again."""
        return bool(self._probed)

    def published(self, topics: AbstractSet[str]) -> bool:
        """Take in that a Kafka transaction to these topics was committed; tell whether one is well again by that."""
        well, self._probed = self._probed & topics, set()
        for topic in well:
            self._shut.forget(topic)
        return bool(well)

    def not_published(self) -> None:
        """Take in that a Kafka transaction came to nothing: what it was to prove is not proved."""
        self._probed.clear()

    def is_fresh(self) -> bool:
        """Tell, once for each list that arrived, that there is a new one."""
        if not self._fresh.is_set():
            return False
        self._fresh.clear()
        return True

    def await_first(self, timeout_s: float) -> None:
        """Have the list fetched if it never was, and wait for it, but not for long."""
        if not self._heard.is_set():
            self.look(time.monotonic())
            self._heard.wait(timeout_s)

    def look(self, now: float) -> None:
        """Have the list fetched, if the last one is not of a moment ago. Does not wait."""
        if self._asking.is_set() or now - self._asked < _LOOK_S:
            return
        self._asked = now
        self._asking.set()
        threading.Thread(target=self._look, name=f"penstock-coordinator-looks-{self._name}", daemon=True).start()

    def _look(self) -> None:
        try:
            counts = self._ask()
            self._lists += 1
            if counts != self._counts:
                self._counts = counts
                self._fresh.set()
        except PenstockError as error:
            _log.warning("%s; what is committed to topics not known yet waits", error)
        finally:
            self._asking.clear()
            self._heard.set()


__all__ = ["NOT_KNOWN", "Pauses", "Targets"]
