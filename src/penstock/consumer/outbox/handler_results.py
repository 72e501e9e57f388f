"""What handlers return, on its way out: it is counted when it is written, and a refusal fails its message.

That message has left its lane by then. So the refusal is put on the lane like a key that is woken, and the lane's next
holder parks the message as if its handler had failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from penstock.clients.kafka_errors import is_missing_right
from penstock.clients.rights import THIS_CLIENT
from penstock.consumer.assignments import ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.outbox.outbox import Submission, Submits, why_refused
from penstock.errors import PenstockError

_log = logging.getLogger(__name__)


class ResultRefusedError(PenstockError):
    """A broker refused what a handler returned."""


class Tries(NamedTuple):
    """How often a message was handed over to its handler before, and since when on the engine's clock."""

    attempts: int
    since: float


class RefusedResults:
    """Put on a lane instead of a woken key: a message whose results were refused."""

    __slots__ = ("error", "item", "tries")

    def __init__(self, item: Item, tries: Tries | None, error: ResultRefusedError) -> None:
        self.item = item
        self.tries = tries
        self.error = error


class HandlerResults:
    """Submits what handlers return. Its counts are written by the outbox's thread."""

    def __init__(self, outbox: Submits, wake: Callable[[ConsumerLane, RefusedResults], None]) -> None:
        self._outbox = outbox
        # Bound once: it is the same for nearly all messages.
        self._then = self._ended
        #: Puts a refusal on a lane, and has the lane served.
        self.wake = wake
        #: Whom the brokers take the producer for. Set before the start.
        self.principal = THIS_CLIENT
        #: Messages whose results are all written, and those results.
        self.handled = 0
        self.published = 0
        # Topics of which it was logged that this client may not write to them.
        self._forbidden: set[str] = set()

    def submit(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        results: Sequence[Result],
        tries: Sequence[Tries] | None = None,
    ) -> None:
        """Have results written, and then these messages done. By the holder of their lane.

        `tries` are those of each message, where some were tried before.
        """
        then = self._then if tries is None else partial(self._ended, tries=tries)
        self._outbox.submit(items, results, then, lane)

    def _ended(self, submission: Submission, tries: Sequence[Tries] | None = None) -> None:
        """Count what is written; fail each message whose results were refused."""
        if submission.is_written:
            self.handled += len(submission.items)
            self.published += len(submission.messages)
            if self._forbidden:
                self._forbidden.difference_update(message.topic for message in submission.messages)
        elif submission.refusal is not None and submission.lane is not None:
            topic, error = submission.refusal
            refusal = ResultRefusedError(
                f"{topic} does not take what a handler returned: {why_refused(topic, error, self.principal)}; change "
                "the handler or the topic"
            )
            if is_missing_right(error) and topic not in self._forbidden:
                # Its messages fail, by the retry policies of their handlers: a policy does not say what is missing.
                self._forbidden.add(topic)
                _log.error("%s", refusal)
            for place, item in enumerate(submission.items):
                self.wake(submission.lane, RefusedResults(item, None if tries is None else tries[place], refusal))
