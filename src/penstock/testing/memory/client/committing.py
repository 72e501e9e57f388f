"""One client's commits: how they are sent, what a fault makes of them, and where their answers go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.testing.memory import codes
from penstock.testing.memory.faults import Effect, Fault, Operation, as_error
from penstock.testing.memory.group.coordinator import CommitRequest
from penstock.testing.memory.group.group import Member
from penstock.testing.memory.state import BrokerState

#: Seconds that a call waits for an answer (librdkafka's `socket.timeout.ms`).
ANSWER_S = 60.0

OnCommit = Callable[[KafkaError | None, list[TopicPartition]], None]


class AnsweredPartition(TopicPartition):
    """A `TopicPartition` with an error, which the client library makes only itself."""

    def __init__(self, point: TopicPartition, error: KafkaError | None) -> None:
        # The library tells an absent metadata from an empty one, and takes no None.
        metadata = () if point.metadata is None else (point.metadata,)
        super().__init__(point.topic, point.partition, point.offset, *metadata)
        self._error = error

    @property
    def error(self) -> KafkaError | None:  # type: ignore[override] # an attribute in the stub, read-only in truth
        """Why this partition was refused, or None."""
        return self._error


class Committing:
    """Sends the commits of one client. The broker's lock guards it, but for `serve`."""

    def __init__(self, group: str, on_commit: OnCommit | None, state: BrokerState, cut_off: Callable[[], bool]) -> None:
        self._group = group
        self._on_commit = on_commit
        self._state = state
        self._cut_off = cut_off
        #: Answers that `on_commit` has not heard yet.
        self.answers: deque[tuple[KafkaError | None, list[TopicPartition]]] = deque()

    def serve(self) -> None:
        """Hand over the answers, without the broker's lock."""
        while self.answers:
            error, points = self.answers.popleft()
            if self._on_commit is not None:
                self._on_commit(error, points)

    def send(self, member: Member | None, points: Sequence[TopicPartition]) -> None:
        """Commit, and let the answer come to `on_commit`."""

        def answer(error: KafkaError | None) -> None:
            self._answer(error, points)

        self._send(self._request(member, points), self._state.faults.take(Operation.COMMIT_ASYNC), answer)

    def send_and_wait(self, member: Member | None, points: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Commit and let the clock go on until there is an answer; `KafkaException` where it is not a yes in time."""
        answers: list[KafkaError | None] = []
        self._send(self._request(member, points), self._state.faults.take(Operation.COMMIT_SYNC), answers.append)
        coordinator, clock = self._state.coordinator, self._state.clock
        deadline = clock.monotonic() + ANSWER_S
        while not answers and (now := clock.monotonic()) < deadline:
            clock.sleep(min(deadline, coordinator.next_due()) - now)
            coordinator.tick(clock.monotonic())
        error = answers[0] if answers else KafkaError(codes.TIMED_OUT)
        if error is not None:
            raise failed(error.code(), f"Commit failed: {error.str()}")
        return [AnsweredPartition(point, None) for point in points]

    def _request(self, member: Member | None, points: Iterable[TopicPartition]) -> CommitRequest:
        return CommitRequest(
            self._group,
            member,
            -1 if member is None else member.generation,
            [(point.topic, point.partition, point.offset, point.metadata) for point in points],
        )

    def _answer(self, error: KafkaError | None, points: Iterable[TopicPartition]) -> None:
        # The client library writes the error of the whole to every partition.
        self.answers.append((error, [AnsweredPartition(point, error) for point in points]))

    def _send(self, request: CommitRequest, fault: Fault | None, answer: Callable[[KafkaError | None], None]) -> None:
        coordinator = self._state.coordinator

        def execute() -> KafkaError | None:
            code = coordinator.accept(request)
            return None if code is None else as_error(code)

        decided = fault is not None and fault.effect in {Effect.REFUSED, Effect.ARRIVES_LATE}
        if not decided and (self._cut_off() or coordinator.away):
            coordinator.hold(self._cut_off, lambda: answer(execute()))
        else:
            coordinator.deliver(fault, execute, answer)

    def committed(self, partitions: Iterable[TopicPartition], timeout: float) -> list[TopicPartition]:
        """Return the group's offsets; `KafkaException` without an answer within `timeout` seconds of the clock."""
        fault = self._state.faults.take(Operation.COMMITTED)
        if fault is not None:
            raise KafkaException(fault.error)
        coordinator, clock = self._state.coordinator, self._state.clock
        if self._cut_off() or coordinator.away:
            allowed_s = timeout if timeout >= 0 else ANSWER_S
            missing = float("inf") if self._cut_off() else coordinator.away_until - clock.monotonic()
            clock.sleep(min(allowed_s, missing))
            if missing > allowed_s:
                raise failed(codes.TIMED_OUT, "Failed to get committed offsets: Local: Timed out")
            coordinator.tick(clock.monotonic())
        offsets = coordinator.offsets.get(self._group, {})
        answer = []
        for partition in partitions:
            found = offsets.get((partition.topic, partition.partition))
            offset = codes.INVALID if found is None else found.offset
            # The library tells an absent metadata from an empty one, and takes no None.
            metadata = () if found is None or found.metadata is None else (found.metadata,)
            answer.append(TopicPartition(partition.topic, partition.partition, offset, *metadata))
        return answer


def failed(code: int, text: str) -> KafkaException:
    """Return the exception of an error, to be raised."""
    return KafkaException(KafkaError(code, text))
