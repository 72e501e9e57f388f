"""The replay of dead letters: selects them, sends them to a target topic, and stores the progress.

The progress of a batch is stored after its acknowledgement: a replay that is killed loses nothing, and the next one
repeats at most one batch. Dead letters that were not selected, or have no target, stay pending for another replay.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import compress, pairwise

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock import clients
from penstock.clients.answers import CONNECT_TIMEOUT_S
from penstock.clients.renewal import cause_of
from penstock.clients.rights import MissingRightError, Operation, group_right, require_rights, topic_right
from penstock.dead_letters.headers import replayed
from penstock.dead_letters.reader import REPLAY_GROUP, DeadLetter, DeadLetterLog
from penstock.errors import ConfigurationError, PenstockError, TopicNotFoundError
from penstock.group_offsets.planning import Change, change
from penstock.group_offsets.positions import Position
from penstock.offsets import joined

#: The delivery timeout of a message in seconds.
_DELIVERY_S = 30
_POLL_S = 0.5
#: No limit by the client: the broker and the target topic have theirs.
_MAX_MESSAGE_BYTES = 1_000_000_000


class Unsent(Enum):
    """The reason why a selected dead letter is not sent."""

    NO_ORIGIN = "has no valid original topic"
    NO_TOPIC = "has an original topic that does not exist"
    HIDDEN = "has an original topic that this user may not see"
    ITSELF = "names the dead-letter topic as its original topic"
    #: The default of a share group (KIP-1191: `errors.deadletterqueue.copy.record.enable`).
    NOT_COPIED = "has neither key nor value: the broker wrote only its origin, so replay the original"


@dataclass(frozen=True, slots=True)
class Selection:
    """The criteria of a replay; None excludes no dead letter."""

    #: The class of the error, with or without its module.
    exception: str | None = None
    #: The original topic.
    topic: str | None = None
    #: A partition of the dead-letter topic, and its first offset.
    place: tuple[int, int] | None = None
    #: Whether only the dead letter at that place is selected.
    is_single: bool = False

    def includes(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter is selected by its origin and its error."""
        origin = letter.origin
        if self.topic not in {None, origin.topic}:
            return False
        name = origin.exception or ""
        return self.exception in {None, name, name.rpartition(".")[2]}


@dataclass(slots=True)
class Outcome:
    """The counts of a replay, updated while it runs."""

    #: Messages sent, by target topic.
    sent: Counter[str] = field(default_factory=Counter)
    #: Dead letters that an earlier replay sent.
    sent_before: int = 0
    #: Dead letters that were not selected.
    not_chosen: int = 0
    #: Selected dead letters that were not sent, by reason.
    unsent: Counter[Unsent] = field(default_factory=Counter)
    #: The place of the first one for each reason.
    first_unsent: dict[Unsent, str] = field(default_factory=dict)
    #: Original topics that this user may not see.
    hidden: set[str] = field(default_factory=set)
    #: Partitions whose progress is too large for the commit metadata.
    cut: set[int] = field(default_factory=set)


class Replay:
    """Sends the dead letters of one topic back to work. For one thread, and one run.

    Args:
        log: the reader of dead letters.
        topic: the dead-letter topic.
        selection: the dead letters to send.
        to: the target topic; None sends each to its original topic.
        limit: the number of dead letters to send at most.
        again: whether to send also those that an earlier replay sent.
        dry_run: sends nothing and stores no progress.

    Raises:
        ConfigurationError: the target or the place is impossible.
        MissingRightError: all missing permissions, except those on original topics, which are unknown yet.
    """

    def __init__(
        self,
        log: DeadLetterLog,
        topic: str,
        selection: Selection,
        *,
        to: str | None = None,
        limit: int | None = None,
        again: bool = False,
        dry_run: bool = False,
    ) -> None:
        count = log.partitions(topic)
        if to == topic:
            raise ConfigurationError(f"{topic} would be replayed to itself for ever; name another topic after --to")
        if to is not None and to not in log.topics():
            raise ConfigurationError(f"there is no topic {to} to replay to; create it first, or correct the name")
        if selection.place is not None and selection.place[0] >= count:
            raise ConfigurationError(f"{topic} has no partition {selection.place[0]}; its last is {count - 1}")
        self._log = log
        self._topic = topic
        self._selection = selection
        self._to = to
        self._limit = limit
        self._again = again
        self._producer = None if dry_run else self._connect()
        self.outcome = Outcome()
        # The reason why an original topic is no target, by name; None if it is one. Each is asked for once.
        self._targets: dict[str, Unsent | None] = {}

    def run(self) -> None:
        """Replay up to the present end of the topic; `outcome` is valid also if it raises.

        Raises `PenstockError` if a message could not be sent, or the progress could not be stored.
        """
        place = self._selection.place
        for number in range(self._log.partitions(self._topic)) if place is None else (place[0],):
            if self._is_full:
                return
            self._run_partition(number)

    @property
    def _is_full(self) -> bool:
        return self._limit is not None and self.outcome.sent.total() >= self._limit

    def failure(self) -> PenstockError | None:
        """Return the error about selected dead letters without a target, or None."""
        outcome = self.outcome
        if not outcome.unsent:
            return None
        each = "; ".join(
            f"{count} {why.value}, for example {outcome.first_unsent[why]}" for why, count in outcome.unsent.items()
        )
        what = f"{outcome.unsent.total()} of {self._topic} could not be sent and stay: {each}"
        if outcome.hidden:
            rights = [topic_right(Operation.WRITE, name) for name in sorted(outcome.hidden)]
            return MissingRightError(what, rights, self._log.principal)
        return PenstockError(f"{what}; see them with `penstock dlq show`, or name a topic for them with --to")

    def _connect(self) -> Producer:
        log, needed = self._log, [topic_right(Operation.READ, self._topic), group_right(REPLAY_GROUP)]
        needed += [topic_right(Operation.WRITE, self._to)] if self._to is not None else []
        admin = clients.admin(log.bootstrap_servers, log.config)
        require_rights(admin, f"{self._topic} cannot be replayed", needed, CONNECT_TIMEOUT_S)
        return clients.producer(
            log.bootstrap_servers,
            {
                **log.config,
                "enable.idempotence": True,
                "linger.ms": 0,
                # A topic's size limit is for a batch: a message that fits alone must not fail in a batch.
                "batch.num.messages": 1,
                "delivery.timeout.ms": _DELIVERY_S * 1000,
                "message.max.bytes": _MAX_MESSAGE_BYTES,
            },
        )

    def _run_partition(self, number: int) -> None:
        low, high = self._log.bounds(self._topic, number)
        before = replace(self._log.replayed(self._topic, number), log=range(low, high))
        if before.is_past_the_end:  # the topic was recreated
            before = Position(self._topic, number, None, before.log)
        begin = max(low, before.committed or 0)
        first, end = low if self._again else begin, high
        if self._selection.place is not None:
            first = max(low if self._selection.is_single else first, self._selection.place[1])
            end = min(high, first + 1) if self._selection.is_single else high
        done: Sequence[range] = before.done
        for batch in self._log.read(self._topic, number, first, end):
            acknowledged, failure = self._send_selected(before, batch)
            # Offsets between messages, such as transaction markers, count with the message after them.
            edges = [first, *(letter.offset + 1 for letter in batch)]
            first = edges[-1]
            if acknowledged and self._producer is not None:
                sent = [letter.offset in acknowledged or before.is_done(letter.offset) for letter in batch]
                done = joined((*done, *(range(*edge) for edge in compress(pairwise(edges), sent))))
                self._store_progress(change(REPLAY_GROUP, before, begin, done), failure)
            if failure is not None:
                raise failure
            if self._is_full:
                return

    def _send_selected(self, before: Position, batch: Sequence[DeadLetter]) -> tuple[set[int], PenstockError | None]:
        """Send the selected dead letters of a batch, up to the limit; return the result of `_send`."""
        selected: list[tuple[DeadLetter, str]] = []
        room = len(batch) if self._limit is None else self._limit - self.outcome.sent.total()
        for letter in batch:
            if len(selected) >= room:
                break
            target = self._target_of(letter, was_sent=before.is_done(letter.offset))
            if target is not None:
                selected.append((letter, target))
        acknowledged, failure = self._send(selected)
        self.outcome.sent.update(target for letter, target in selected if letter.offset in acknowledged)
        return acknowledged, failure

    def _target_of(self, letter: DeadLetter, *, was_sent: bool) -> str | None:
        """Return the target topic of a dead letter, or None, which is counted by its reason."""
        if was_sent and not self._again:
            self.outcome.sent_before += 1
            return None
        if not self._selection.includes(letter):
            self.outcome.not_chosen += 1
            return None
        target = self._to or letter.origin.topic
        why = Unsent.NOT_COPIED if letter.is_metadata_alone else self._why_no_target(target)
        if why is None:
            return target
        self.outcome.unsent[why] += 1
        self.outcome.first_unsent.setdefault(why, letter.place)
        return None

    def _why_no_target(self, target: str | None) -> Unsent | None:
        """Return the reason why a topic is no target, or None if it is one."""
        if target is None or target == self._topic:
            return Unsent.NO_ORIGIN if target is None else Unsent.ITSELF
        if target not in self._targets:
            self._targets[target] = None
            try:
                self._log.partitions(target)
            except MissingRightError:
                self._targets[target] = Unsent.HIDDEN
                self.outcome.hidden.add(target)
            except TopicNotFoundError:
                self._targets[target] = Unsent.NO_TOPIC
        return self._targets[target]

    def _send(self, selected: Sequence[tuple[DeadLetter, str]]) -> tuple[set[int], PenstockError | None]:
        """Send dead letters of one partition; return the acknowledged offsets, and the first failure."""
        # Without messages a failed producer does not matter.
        if (producer := self._producer) is None or not selected:
            return {letter.offset for letter, _ in selected}, None
        acknowledged: set[int] = set()
        failures: list[PenstockError] = []

        def delivered(letter: DeadLetter, target: str, error: KafkaError | None, _message: object) -> None:
            if error is None:
                acknowledged.add(letter.offset)
            else:
                failures.append(self._not_sent(letter, target, error))

        for letter, target in selected:
            if failures:
                break  # so that few later messages overtake the failed one
            try:
                self._produce(producer, letter, target, partial(delivered, letter, target))
            except KafkaException as error:
                failures.append(self._not_sent(letter, target, cause_of(error, producer.poll)))
        # Polls instead of a flush: a flush loses the reason if the client fails meanwhile.
        deadline = time.monotonic() + _DELIVERY_S + 5
        while len(producer) and time.monotonic() < deadline:
            try:
                producer.poll(_POLL_S)
            except KafkaException as error:  # a fatal error is the cause of the other failures
                failures.insert(0, self._not_sent(*selected[0], error.args[0]))
        if len(producer) and not failures:
            failures.append(self._not_sent(*selected[0], KafkaError(KafkaError._MSG_TIMED_OUT)))  # noqa: SLF001 - a public code of the library
        return acknowledged, failures[0] if failures else None

    def _produce(self, producer: Producer, letter: DeadLetter, target: str, delivered: partial[None]) -> None:
        headers = replayed(letter.headers, letter.topic, letter.partition, letter.offset)
        number = self._partition_for(letter, target)
        while True:
            try:
                producer.produce(
                    target, letter.value, key=letter.key, partition=number, headers=headers, on_delivery=delivered
                )
            except BufferError:
                producer.poll(_POLL_S)  # every message leaves the queue within the delivery time
            else:
                producer.poll(0)
                return

    def _partition_for(self, letter: DeadLetter, target: str) -> int:
        """Return the original partition if it is known, because its producer may use another hash; else -1."""
        topic, partition = letter.origin.topic, letter.origin.partition
        if topic != target or partition is None or partition >= self._log.partitions(target):
            return -1
        return partition

    def _store_progress(self, progress: Change, failure: PenstockError | None) -> None:
        if progress.cut:
            self.outcome.cut.add(progress.before.partition)
        try:
            self._log.store_progress(progress)
        except PenstockError as error:
            # This error comes first: the next run meets the failure to send again.
            raise error from failure or error.__cause__

    def _not_sent(self, letter: DeadLetter, target: str, error: KafkaError) -> PenstockError:
        what = f"{letter.place} could not be sent to {target}; the messages sent are stored in group {REPLAY_GROUP}"
        remedy = "fix the cause, or leave it out with --from or --where"
        return self._log.failure(error, what, topic_right(Operation.WRITE, target), remedy)
