"""Requests to give up the message that holds a partition: checks, waiting, and the errors of refusals.

The holder of the message's lane carries out a request, in `lanes/parking.py`. This file has the slow parts, which run
on the caller's thread: it creates the dead-letter topic, and explains why a message was not given up.
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

#: Seconds between two checks whether a request can still be carried out.
_POLL_S = 0.1
#: Why a message that holds its partition is not given up, by its state.
_WHY_NOT = {
    "in handler": "it is still in its handler, although that was interrupted; ask again: a call that does not return "
    "is given up after some seconds",
    "put off": "its handler has put its completion off; ask again when the completion has come or failed",
    "publishing": "its handler is done with it, and its results or its dead letter are being written",
    "queued": "it waits for a worker, and has not been tried yet",
    "held by rate": "it waits for the rate of its handler; raise the rate by change_handler(topic, rate=...)",
    "dead letter": "it is given up already, and the topic that it goes to refuses it",
    "behind its key": "it waits behind another message of its key; give up that message",
    "behind a call": "it waits for a call that does not return; give up the message of that call if it holds a "
    "partition, or restart the member",
    "parked": "the worker of its lane is in another handler, or the consumer stops because of it; ask again when that "
    "handler has returned",
}


class GivingUp:
    """Requests to one running engine; `explain` explains its partitions. Thread-safe."""

    def __init__(self, engine: Engine, cluster: Cluster, explain: Callable[[], Sequence[Explanation]]) -> None:
        self._engine = engine
        self._cluster = cluster
        self._explain = explain

    def ask(self, topic: str, partition: int, offset: int) -> GiveUp:
        """Request that a message is given up; raise `NotGivenUpError` if it does not hold its partition."""
        place, processor = f"{topic}:{partition}@{offset}", self._engine.processor
        for assignment in self._engine.assignments.all():
            if (assignment.topic, assignment.partition) == (topic, partition):
                break
        else:
            raise NotGivenUpError(f"{place} was not given up: this member does not have {topic}:{partition}")
        self._require_blocking(assignment, offset)
        new = GiveUp((assignment, offset), self._prepare_topic(assignment, place))
        # Two requests for the same message share one object.
        request = processor.give_ups.setdefault(new.place, new)
        # The holder of its lane gives up a parked message; `Watchdog` interrupts a message in its handler.
        processor.wake_all()
        return request

    def wait(self, request: GiveUp, timeout: float = 0.0) -> str:
        """Wait until a message is in its dead-letter topic, and return the name of the topic.

        Raises `NotGivenUpError` if it is not there in time. A request that no thread has acted on is then withdrawn.
        """
        assignment, offset = request.place
        deadline = time.monotonic() + timeout
        while not request.outcome.done() and (left := deadline - time.monotonic()) > 0:
            if not request.outcome.running() and (not assignment.active or assignment.tracker.watermark != offset):
                break  # it no longer holds its partition, and no thread has acted on the request
            with suppress(TimeoutError, CancelledError):
                request.outcome.result(min(_POLL_S, left))
        place = f"{assignment}@{offset}"
        if request.outcome.cancel():
            if self._engine.processor.give_ups.get(request.place) is request:
                self._engine.processor.give_ups.pop(request.place, None)
            found = self._require_blocking(assignment, offset)
            detail = "" if found.detail is None else f" ({found.detail})"
            why = _WHY_NOT.get(found.state, f"it is {found.state}")
            raise NotGivenUpError(f"{place} was not given up: {why}{detail}")
        if not request.outcome.done():
            words = self._engine.dead_letter_publisher.states.get(request.place, "it is being written")
            raise NotGivenUpError(
                f"{place} is given up, and not in {request.topic} yet: {words}; its key and its offset wait for that",
                is_under_way=True,
            )
        if (refusal := request.outcome.result()) is not None:
            raise NotGivenUpError(f"{place} was not given up: {refusal}")
        return request.topic

    def _require_blocking(self, assignment: Assignment, offset: int) -> Explanation:
        """Return the explanation of a message's partition; raise `NotGivenUpError` if the message does not hold it."""
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
        """Return the dead-letter topic, and create it if the handler's start-up did not."""
        handler, source = assignment.route.handler, assignment.source
        name = handler.dead_letter_topic_of(source)
        if handler.on_failure is not OnFailure.DEAD_LETTER:

            def prepare() -> None:
                create_outputs(self._cluster, self._cluster.require_topics([source]), {name: (source,)})
                missing = self._cluster.ask_rights([topic_right(Operation.WRITE, name)]).wait().missing
                if missing:
                    raise MissingRightError(f"{place} was not given up", missing, self._engine.principal)

            self._cluster.in_background("making a dead-letter topic", prepare).wait()
        return name
