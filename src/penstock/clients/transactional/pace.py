"""How slow the brokers are, as measured, and the limits of Kafka transactions that follow from it.

A limit that fits brokers which are well gives up on slow ones what would have come: it takes a topic for one that takes
no message, a producer for one that hangs, and does the same work again. So limits grow with what is measured, within a
bound that the user sets, and shrink again.
"""

from __future__ import annotations

#: The most seconds that a limit grows to, unless the user sets another.
MOST_S = 30.0
#: A limit is so many times the slowest transaction of late.
_TIMES = 4.0
#: What is left of the slowest with each that was quicker.
_KEPT = 0.9


class Pace:
    """The seconds that Kafka transactions take on one cluster, from their begin to the answer of their end.

    Noted by every thread that publishes, asked by any: it is one number, and a note that is lost to another one at the
    same moment is as good as that one.

    Args:
        most_s: seconds that no limit grows beyond; a limit that is longer anyway stays what it is.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._slow_s = 0.0

    def note(self, took_s: float) -> None:
        """Take note of how long a transaction took, or has taken by now; one that was given up, too."""
        self._slow_s = max(took_s, self._slow_s * _KEPT)

    def limit(self, well_s: float, times: float = _TIMES) -> float:
        """Return the limit in seconds of what may take `well_s` on brokers that are well.

        It grows to so many `times` the slowest transaction of late.
        """
        return max(well_s, min(times * self._slow_s, self._most_s))
