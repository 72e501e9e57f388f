"""Giving up the message that holds a partition, by request: what is asked, when it is refused, and what came of it.

It is done by the holder of the message's lane, as `lanes/give_ups.py` says. Here, on the thread of who asks, is all
that may take time: an error says in a sentence why a message cannot be given up, and its dead-letter topic is made.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from concurrent.futures import CancelledError
from contextlib import suppress

from penstock.clients.cluster import Cluster
from penstock.clients.rights import MissingRightError, Operation, topic_right
from penstock.consumer.assignments import Assignment, ConsumerLane
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.inspect.details import parked_heads
from penstock.consumer.inspect.explain import Explanation
from penstock.consumer.lanes.give_ups import GiveUp
from penstock.consumer.lanes.parking import GIVEABLE
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
    "parked": "the consumer stops because of it",
}


class GivingUp:
    """Asks an engine that runs. Thread-safe."""

    def __init__(self, engine: Engine, cluster: Cluster) -> None:
        self._engine = engine
        self._cluster = cluster

    def ask(self, topic: str, partition: int, offset: int) -> GiveUp:
        """Ask for a message to be given up; raise `NotGivenUpError` where it cannot be."""
        place = f"{topic}:{partition}@{offset}"
        assignment = next(
            (each for each in self._engine.assignments.all() if (each.topic, each.partition) == (topic, partition)),
            None,
        )
        if assignment is None:
            raise NotGivenUpError(f"{place} was not given up: this member does not have {topic}:{partition}")
        found = self._require_blocking(assignment, place, offset)
        parked = self._parked(assignment, offset)
        if parked is None and not self._is_in_handler(topic, partition, offset):
            raise NotGivenUpError(self._why_not(found, assignment, place))
        dead_letter_topic = self._prepare_topic(assignment, place)
        asked = self._engine.processor.give_ups.ask((assignment, offset), dead_letter_topic)
        if parked is not None:
            self._engine.processor.wake_key(*parked)
        # Else the poll thread sees it, and interrupts the call: see `TimeLimits`.
        return asked

    def wait(self, up: GiveUp, timeout: float) -> str:
        """Wait until a message is in its dead-letter topic, and return the name of that; raises as `judge`."""
        assignment, offset = up.place
        deadline = time.monotonic() + timeout
        while not up.outcome.done() and (left := deadline - time.monotonic()) > 0:
            if not up.outcome.running() and (not assignment.active or assignment.tracker.watermark != offset):
                break  # it does not hold its partition any more, and nobody has acted on the request
            with suppress(TimeoutError, CancelledError):
                up.outcome.result(min(_POLL_S, left))
        return self.judge(up)

    def judge(self, up: GiveUp) -> str:
        """Return the dead-letter topic that has the message; raise `NotGivenUpError` where that has not come about.

        What nobody has acted on is taken back.
        """
        assignment, offset = up.place
        place = f"{assignment}@{offset}"
        if self._engine.processor.give_ups.withdraw(up):
            raise NotGivenUpError(self._why_not(self._require_blocking(assignment, place, offset), assignment, place))
        if not up.outcome.done():
            words = self._engine.dead_letter_publisher.states.get(up.place, "it is being written")
            raise NotGivenUpError(
                f"{place} is given up, and not in {up.topic} yet: {words}; its key and its offset wait for that",
                is_under_way=True,
            )
        if (refusal := up.outcome.result()) is not None:
            raise NotGivenUpError(f"{place} was not given up: {refusal}")
        return up.topic

    def _require_blocking(self, assignment: Assignment, place: str, offset: int) -> Explanation:
        """Return the explanation of the partition that a message holds."""
        found = next(
            (
                explanation
                for explanation in self._engine.explain()
                if (explanation.topic, explanation.partition) == (assignment.topic, assignment.partition)
            ),
            None,
        )
        if found is None or not assignment.active:
            raise NotGivenUpError(f"{place} was not given up: its partition has left this member")
        if found.blocking_offset != offset:
            holder = "nothing" if found.blocking_offset is None else f"offset {found.blocking_offset}, {found.state},"
            raise NotGivenUpError(f"{place} was not given up: it does not hold {assignment}; {holder} does")
        return found

    def _parked(self, assignment: Assignment, offset: int) -> tuple[ConsumerLane, Hashable] | None:
        """Return the lane and the key of a message that is parked and can be given up. What is seen is a hint."""
        for lane, key, parked, (fetch, _, record) in parked_heads(self._engine.scheduler):
            if (fetch.assignment, record.offset()) == (assignment, offset):
                return (lane, key) if parked.state in GIVEABLE else None
        return None

    def _is_in_handler(self, topic: str, partition: int, offset: int) -> bool:
        """Tell whether a message is in its handler, of this incarnation of its partition or a former one."""
        return any(
            (fetch.assignment.topic, fetch.assignment.partition, record.offset()) == (topic, partition, offset)
            for slot in self._engine.slots()
            if slot.lane is not None and (fetch := slot.fetch) is not None and (record := slot.record) is not None
        )

    def _why_not(self, found: Explanation, assignment: Assignment, place: str) -> str:
        why = _WHY_NOT.get(found.state, f"it is {found.state}")
        if found.state == "parked" and self._parked(assignment, found.blocking_offset or 0) is not None:
            why = "the worker of its lane is in another handler; ask again when that has returned"
        detail = "" if found.detail is None else f" ({found.detail})"
        return f"{place} was not given up: {why}{detail}"

    def _prepare_topic(self, assignment: Assignment, place: str) -> str:
        """Return the dead-letter topic, which is there and writable then; only some handlers have asked for theirs."""
        handler, source = assignment.route.handler, assignment.route.source or assignment.topic
        name = handler.dead_letter_topic.replace("{topic}", source)
        if handler.on_failure is not OnFailure.DEAD_LETTER:

            def prepare() -> None:
                create_outputs(self._cluster, self._cluster.require_topics([source]), {name: (source,)})
                missing = self._cluster.ask_rights([topic_right(Operation.WRITE, name)]).wait().missing
                if missing:
                    raise MissingRightError(f"{place} was not given up", missing, self._cluster.principal)

            self._cluster.in_background("making a dead-letter topic", prepare).wait()
        return name
