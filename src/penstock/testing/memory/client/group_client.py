"""The group side of a consumer client: membership, rebalance callbacks, and commits with their answers.

Callbacks run on the thread of the caller, without the broker's lock. The lock guards all else here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock.clients.cluster import RebalanceCallback
from penstock.testing.memory import codes
from penstock.testing.memory.client.fetching import Fetcher, error_message
from penstock.testing.memory.faults import Effect, Operation, as_error
from penstock.testing.memory.group.coordinator import CommitRequest
from penstock.testing.memory.group.group import Change, Gone, Member
from penstock.testing.memory.log import Place
from penstock.testing.memory.state import BrokerState

#: librdkafka's defaults.
_SESSION_MS = 45_000
_POLL_MS = 300_000
#: Seconds that a call waits for an answer (librdkafka's `socket.timeout.ms`).
ANSWER_S = 60.0


class AnsweredPartition(TopicPartition):
    """A `TopicPartition` with an error. Only the client library can make a plain one with an error."""

    def __init__(self, point: TopicPartition, error: KafkaError | None) -> None:
        # The library distinguishes missing metadata from empty metadata, and accepts no None.
        metadata = () if point.metadata is None else (point.metadata,)
        super().__init__(point.topic, point.partition, point.offset, *metadata)
        self._error = error

    @property
    def error(self) -> KafkaError | None:  # type: ignore[override] # an attribute in the stub, read-only in truth
        """The error of this partition, or None."""
        return self._error


class GroupClient:
    """The part of a consumer client that talks to the group's coordinator."""

    _closed = False

    def __init__(self, config: Mapping[str, Any], state: BrokerState) -> None:
        self._state = state
        self._clock, self._coordinator = state.clock, state.coordinator
        self._config = config
        self._group = str(config["group.id"])
        self._fetcher = Fetcher(config, state)
        self._topics: list[str] = []
        self._callbacks: dict[str, RebalanceCallback | None] = {}
        self._reported_eviction = False
        # Whether its requests do not reach the broker.
        self._cut_off = False
        #: The group's record of this member, or None.
        self._member: Member | None = None
        # Errors to return instead of messages, and answers still to be given to `on_commit`.
        self._errors: deque[Message] = deque()
        self._answers: deque[tuple[KafkaError | None, list[TopicPartition]]] = deque()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("Consumer closed")

    def _tick(self) -> float:
        """Run the coordinator's due events and return the time."""
        now = self._clock.monotonic()
        self._coordinator.tick(now)
        return now

    # Membership

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Join the group. `poll`, `consume` and `close` call the callbacks."""
        self._require_open()
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        self._change_topics(topics)

    def unsubscribe(self) -> None:
        """Drop all topics. A callback revokes the assigned partitions."""
        self._require_open()
        self._change_topics(())

    def memberid(self) -> str:
        """Return the member id from the coordinator, or an empty string."""
        return "" if self._member is None else self._member.name

    def _change_topics(self, topics: Sequence[str]) -> None:
        """Join the group, or stay in it with other topics."""
        with self._state.lock:
            self._topics = list(topics)
            if self._member is not None and self._member.gone is None:
                self._coordinator.group(self._group).change_topics(self._member, topics)
            elif topics:
                self._join()

    def _join(self) -> None:
        if self._cut_off or self._coordinator.away:
            return
        now = self._tick()
        self._reported_eviction = False
        self._member = Member(
            self._coordinator.new_name(),
            tuple(self._topics),
            float(self._config.get("session.timeout.ms", _SESSION_MS)) / 1000,
            float(self._config.get("max.poll.interval.ms", _POLL_MS)) / 1000,
            now,
        )
        self._coordinator.group(self._group).join(self._member)

    def _serve(self) -> None:
        """Deliver answers of commits, and call the callbacks that are due. Called without the lock."""
        self._serve_answers()
        member = self._member
        if member is None:
            if self._topics:
                with self._state.lock:
                    self._join()
        elif member.gone is not None:
            self._serve_eviction(member, member.gone)
        elif member.change is not None:
            self._serve_change(member, member.change)

    def _serve_eviction(self, member: Member, reason: Gone) -> None:
        if reason is Gone.POLL_INTERVAL and not self._reported_eviction:
            # The error is returned first, and the next call calls the callback.
            self._reported_eviction = True
            text = f"Application maximum poll interval ({member.poll_s * 1000:.0f}ms) exceeded"
            self._errors.append(error_message(KafkaError(codes.MAX_POLL_EXCEEDED, text)))
            return
        self._drop("lost", list(self._fetcher.assigned))
        with self._state.lock:
            self._member = None
            self._join()

    def _serve_change(self, member: Member, change: Change) -> None:
        absent = [place for place in change.revoked if place not in self._state.logs]
        for topic, partition in absent:
            text = f"Subscribed topic not available: {topic}: Broker: Unknown topic or partition"
            error = KafkaError(codes.UNKNOWN_TOPIC_OR_PARTITION, text)
            self._errors.append(error_message(error, topic, partition))
        self._drop("lost", absent)
        self._drop("revoke", [place for place in change.revoked if place not in absent])
        if member.gone is not None:
            # The callback took too long. The next call handles the eviction.
            return
        if callback := self._callbacks.get("assign"):
            self.call_back("assign", callback, [TopicPartition(*place) for place in change.added])
        with self._state.lock:
            for place in change.added:
                if place not in self._fetcher.assigned:
                    self._fetcher.assign(place, codes.INVALID)
            for place in change.revoked:
                member.owned.pop(place, None)
            member.owned.update(dict.fromkeys(change.added))
            self._coordinator.group(self._group).served(member)

    def _drop(self, name: str, places: Sequence[Place]) -> None:
        """Call a callback and unassign the partitions that it left assigned, as the client library does."""
        callback = self._callbacks.get(name) or self._callbacks.get("revoke")
        if places and callback is not None:
            self.call_back(name, callback, [TopicPartition(*place) for place in places])
        with self._state.lock:
            for place in places:
                if place in self._fetcher.assigned:
                    self._fetcher.unassign(place)

    def call_back(self, name: str, callback: RebalanceCallback, partitions: list[TopicPartition]) -> None:  # noqa: ARG002 - for who listens
        """Call a rebalance callback. Its name is "assign", "revoke" or "lost"."""
        callback(self, partitions)

    # Commits

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        """Commit offsets with their metadata. The answer to an asynchronous commit goes to `on_commit`.

        A synchronous commit moves the clock until its answer. `KafkaException` if it was refused, wholly or in part, or
        got no answer within 60 s.
        """
        self._require_open()
        points = [offset for offset in offsets if offset.offset >= 0]
        if not points:
            raise failed(codes.NO_OFFSET, "Commit failed: Local: No offset stored")
        with self._state.lock:
            self._tick()
            if asynchronous:
                # The client library copies the error of the request to every partition.
                self._request(
                    Operation.COMMIT_ASYNC,
                    points,
                    lambda error: self._answers.append((error, [AnsweredPartition(point, error) for point in points])),
                )
                return None
            answers: list[KafkaError | None] = []
            self._request(Operation.COMMIT_SYNC, points, answers.append)
            deadline = self._clock.monotonic() + ANSWER_S
            while not answers and (now := self._clock.monotonic()) < deadline:
                self._clock.sleep(min(deadline, self._coordinator.next_due()) - now)
                self._tick()
            error = answers[0] if answers else KafkaError(codes.TIMED_OUT)
            if error is not None:
                raise failed(error.code(), f"Commit failed: {error.str()}")
            return [AnsweredPartition(point, None) for point in points]

    def _request(
        self, operation: Operation, points: Sequence[TopicPartition], answer: Callable[[KafkaError | None], object]
    ) -> None:
        coordinator, member = self._coordinator, self._member
        places = [(point.topic, point.partition, point.offset, point.metadata) for point in points]
        request = CommitRequest(self._group, member, -1 if member is None else member.generation, places)

        def execute() -> KafkaError | None:
            code = coordinator.accept(request)
            return None if code is None else as_error(code)

        fault = self._state.faults.take(operation)
        decided = fault is not None and fault.effect in {Effect.REFUSED, Effect.ARRIVES_LATE}
        if not decided and (self._cut_off or coordinator.away):
            coordinator.hold(lambda: self._cut_off, lambda: answer(execute()))
        else:
            coordinator.deliver(fault, execute, answer)

    def _serve_answers(self) -> None:
        on_commit = self._config.get("on_commit")
        while self._answers:
            answer = self._answers.popleft()
            if on_commit is not None:
                on_commit(*answer)

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return the group's offsets with their metadata; the offset is -1001 if there is none.

        `KafkaException` if the coordinator did not answer within `timeout` seconds of the clock.
        """
        self._require_open()
        with self._state.lock:
            now = self._tick()
            if fault := self._state.faults.take(Operation.COMMITTED):
                raise KafkaException(fault.error)
            if self._cut_off or self._coordinator.away:
                allowed_s = timeout if timeout >= 0 else ANSWER_S
                missing = float("inf") if self._cut_off else self._coordinator.away_until - now
                self._clock.sleep(min(allowed_s, missing))
                if missing > allowed_s:
                    raise failed(codes.TIMED_OUT, "Failed to get committed offsets: Local: Timed out")
                self._tick()
            offsets = self._coordinator.offsets.get(self._group, {})
            answer = []
            for partition in partitions:
                found = offsets.get((partition.topic, partition.partition))
                offset, metadata = (codes.INVALID, None) if found is None else (found.offset, found.metadata)
                # As in `AnsweredPartition`.
                more = () if metadata is None else (metadata,)
                answer.append(TopicPartition(partition.topic, partition.partition, offset, *more))
            return answer

    # The end

    def close(self) -> None:
        """Revoke the assigned partitions and leave the group. An unreachable coordinator gets no request."""
        if self._closed:
            return
        with self._state.lock:
            self._tick()
        member = self._member
        is_member = member is None or member.gone is None
        self._drop("revoke" if is_member else "lost", list(self._fetcher.assigned))
        with self._state.lock:
            if self._cut_off or self._coordinator.away:
                self._stop_heartbeats()
            elif member is not None:
                self._coordinator.group(self._group).leave(member)
        self._serve_answers()
        self._closed = True

    def _stop_heartbeats(self) -> None:
        """Stop the heartbeats of this client. Its session then ends by the clock."""
        if self._member is not None and self._member.unheard_since is None:
            self._member.unheard_since = self._clock.monotonic()

    # A test's control of it

    def kill(self) -> None:
        """End the client as if its process were killed: no callbacks, and no leave request, so the session runs out."""
        with self._state.lock:
            self._closed = True
            self._stop_heartbeats()

    def cut_off(self) -> None:
        """Keep its requests from the broker until `heal`. Its session ends by the clock."""
        with self._state.lock:
            self._cut_off = True
            self._stop_heartbeats()

    def heal(self) -> None:
        """Connect it to the broker again. Its held requests arrive, in order."""
        with self._state.lock:
            now = self._tick()
            self._cut_off = False
            if self._member is not None and self._member.gone is None:
                self._coordinator.group(self._group).heard(self._member, now)
            self._tick()


def failed(code: int, text: str) -> KafkaException:
    """Return an exception with this error, for the caller to raise."""
    return KafkaException(KafkaError(code, text))
