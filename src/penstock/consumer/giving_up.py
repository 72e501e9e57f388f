"""Giving up the message that holds a partition, by request: what is asked, when it is refused, and what came of it.

It is done by the holder of the message's lane, in `lanes/parking.py`. Here, on the thread of who asks, is all that may
take time: its dead-letter topic is made, and an error says in a sentence why a message was not given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress

from penstock.clients.cluster import Cluster
from penstock.clients.rights import MissingRightError, Operation, topic_right
from penstock.consumer.assignments import Assignment
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.lanes.parking import GiveUp
from penstock.consumer.poll.explain import Explanation
from penstock.consumer.poll.topics import create_outputs
from penstock.errors import NotGivenUpError

#: Seconds between two looks whether a request can still be carried out.
_POLL_S = 0.1
#: Why a message that holds its partition is not given up, by where it is.
_WHY_NOT = {
    "in handler": "it is in its handler still, though that was interrupted; ask again: what does not return is given "
    "up after some seconds",
    "put off": "its handler has put its completion off; ask again when that has come, or has failed",
    "publishing": "its handler is done with it, and what that returned is being published",
    "queued": "it waits for a worker, and was not tried yet",
    "held by rate": "it waits for the rate of its handler; raise that by change_handler(topic, rate=...)",
    "dead letter": "it is on its way to another topic already",
    "behind its key": "it stands behind another message of its key; give that up",
    "behind a call": "it waits for that; give its message up where it holds a partition, or start the member again",
    "parked": "the worker of its lane is in another handler, or the consumer stops because of it; ask again when that "
    "handler has returned",
}


class GivingUp:
    """Asks an engine that runs, which `explain` explains. Thread-safe."""

    def __init__(self, engine: Engine, cluster: Cluster, explain: Callable[[], Sequence[Explanation]]) -> None:
        self._engine = engine
        self._cluster = cluster
        self._explain = explain

    def ask(self, topic: str, partition: int, offset: int) -> GiveUp:
        """Ask for a message to be given up, wherever it is; raise `NotGivenUpError` where it holds no partition."""
        place, processor = f"{topic}:{partition}@{offset}", self._engine.processor
        for assignment in self._engine.assignments.all():
            if (assignment.topic, assignment.partition) == (topic, partition):
                break
        else:
            raise NotGivenUpError(f"{place} was not given up: this member does not have {topic}:{partition}")
        self._require_blocking(assignment, offset)
        wanted = GiveUp((assignment, offset), self._prepare_topic(assignment, place))
        # Two who ask for the same share one request.
        asked = processor.give_ups.setdefault(wanted.place, wanted)
        # One that is parked is given up by the holder of its lane; one in its handler is interrupted by `Watchdog`.
        processor.wake_all()
        return asked

    def wait(self, up: GiveUp, timeout: float = 0.0) -> str:
        """Wait until a message is in its dead-letter topic, and return the name of that.

        Raises `NotGivenUpError` where that has not come about. What nobody has acted on is taken back then.
        """
        assignment, offset = up.place
        deadline = time.monotonic() + timeout
        while not up.outcome.done() and (left := deadline - time.monotonic()) > 0:
            if not up.outcome.running() and (not assignment.active or assignment.tracker.watermark != offset):
                break  # it does not hold its partition any more, and nobody has acted on the request
            with suppress(TimeoutError, CancelledError):
                up.outcome.result(min(_POLL_S, left))
        place = f"{assignment}@{offset}"
        if up.outcome.cancel():
            if self._engine.processor.give_ups.get(up.place) is up:
                self._engine.processor.give_ups.pop(up.place, None)
            found = self._require_blocking(assignment, offset)
            detail = "" if found.detail is None else f" ({found.detail})"
            why = _WHY_NOT.get(found.state, f"it is {found.state}")
            raise NotGivenUpError(f"{place} was not given up: {why}{detail}")
        if not up.outcome.done():
            words = self._engine.dead_letter_publisher.states.get(up.place, "it is being written")
            raise NotGivenUpError(
                f"{place} is given up, and not in {up.topic} yet: {words}; its key and its offset wait for that",
                is_under_way=True,
            )
        if (refusal := up.outcome.result()) is not None:
            raise NotGivenUpError(f"{place} was not given up: {refusal}")
        return up.topic

    def _require_blocking(self, assignment: Assignment, offset: int) -> Explanation:
        """Return the explanation of the partition that a message holds."""
        place = f"{assignment}@{offset}"
        explanations = self._explain() if assignment.active else ()
        for found in explanations:
            if (found.topic, found.partition) == (assignment.topic, assignment.partition):
                if found.blocking_offset == offset:
                    return found
                holder = (
                    "nothing" if found.blocking_offset is None else f"offset {found.blocking_offset}, {found.state},"
                )
                raise NotGivenUpError(f"{place} was not given up: it does not hold {assignment}; {holder} does")
        raise NotGivenUpError(f"{place} was not given up: its partition has left this member")

    def _prepare_topic(self, assignment: Assignment, place: str) -> str:
        """Return the dead-letter topic, which is there and writable then; only some handlers have asked for theirs."""
        handler, source = assignment.route.handler, assignment.route.source or assignment.topic
        name = handler.dead_letter_topic.replace("{topic}", source)
        if handler.on_failure is not OnFailure.DEAD_LETTER:

            def prepare() -> None:
                create_outputs(self._cluster, self._cluster.require_topics([source]), {name: (source,)})
                missing = self._cluster.ask_rights([topic_right(Operation.WRITE, name)]).wait().missing
                if missing:
                    raise MissingRightError(f"{place} was not given up", missing, self._engine.principal)

            self._cluster.in_background("making a dead-letter topic", prepare).wait()
        return name
