"""The replay of dead letters: which go back to work, where to, and what is written down when they did.

A batch is written down once it is acknowledged: killed at any moment, a replay loses nothing, and the next one repeats
a batch at most. What was not chosen, or cannot go anywhere, stays open for another replay.
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

#: Seconds a message may take to be acknowledged.
_DELIVERY_S = 30
_POLL_S = 0.5
#: The broker and the target topic set the limit, not the client.
_MAX_MESSAGE_BYTES = 1_000_000_000


class Left(Enum):
    """Why a dead letter that was chosen stays where it is."""

    NO_ORIGIN = "tells no original topic that can be one"
    NO_TOPIC = "has an original topic that does not exist"
    HIDDEN = "has an original topic that this user may not see"
    ITSELF = "says that it comes from the dead-letter topic itself"
    #: A share group's, by default (KIP-1191: `errors.deadletterqueue.copy.record.enable`).
    NOT_COPIED = "has neither key nor value: the broker wrote only where it comes from, so replay the original"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which dead letters are meant; what is None excludes none."""

    #: Class of the error, with or without its module.
    exception: str | None = None
    #: The original topic.
    topic: str | None = None
    #: Partition of the dead-letter topic, and the offset there to begin with.
    place: tuple[int, int] | None = None
    #: Whether only the one at that place is meant.
    alone: bool = False

    def takes(self, letter: DeadLetter) -> bool:
        """Tell whether a dead letter is meant, by where it comes from and why it died."""
        origin = letter.origin
        if self.topic not in {None, origin.topic}:
            return False
        name = origin.exception or ""
        return self.exception in {None, name, name.rpartition(".")[2]}


@dataclass(slots=True)
class Outcome:
    """What a replay did, counted while it does it."""

    #: Messages by the topic they went to.
    sent: Counter[str] = field(default_factory=Counter)
    #: Dead letters an earlier replay sent.
    sent_before: int = 0
    #: Dead letters that were not meant.
    not_chosen: int = 0
    #: Dead letters that could not go anywhere, by the reason.
    left: Counter[Left] = field(default_factory=Counter)
    #: An example of each.
    first_left: dict[Left, str] = field(default_factory=dict)
    #: Original topics that this user may not see.
    hidden: set[str] = field(default_factory=set)
    #: Partitions of which more was sent than can be written down.
    forgetful: set[int] = field(default_factory=set)


class Replay:
    """Sends the dead letters of one topic back to work. For one thread, and used once.

    They go to the topics they came from, or all `to` one, `limit` of them at most. With `again`, those that an earlier
    replay sent are sent too; in a dry run nothing is sent and nothing written down. Raises `ConfigurationError` where
    the target or the place cannot be, and `MissingRightError` for all rights that are missing, save those on original
    topics, which are not known yet.
    """

    def __init__(
        self,
        log: DeadLetterLog,
        topic: str,
        choice: Choice,
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
        if choice.place is not None and choice.place[0] >= count:
            raise ConfigurationError(f"{topic} has no partition {choice.place[0]}; its last is {count - 1}")
        self._log = log
        self._topic = topic
        self._choice = choice
        self._to = to
        self._limit = limit
        self._again = again
        self._producer = None if dry_run else self._connect()
        self.outcome = Outcome()
        # Why nothing can go to original topics, by name; None where something can. Asked once.
        self._asked: dict[str, Left | None] = {}

    def run(self) -> None:
        """Replay up to the end that the topic has now; `outcome` counts along, whatever stops it.

        Raises `PenstockError` where a message could not be sent, or what was sent not be written down.
        """
        all_numbers = range(self._log.partitions(self._topic))
        numbers = all_numbers if self._choice.place is None else [self._choice.place[0]]
        for number in numbers:
            if self._full:
                return
            self._run_partition(number)

    @property
    def _full(self) -> bool:
        return self._limit is not None and self.outcome.sent.total() >= self._limit

    def failure(self) -> PenstockError | None:
        """Return the error of what was chosen and could not go anywhere, or None."""
        outcome = self.outcome
        if not outcome.left:
            return None
        each = "; ".join(f"{count} {why.value}, as {outcome.first_left[why]}" for why, count in outcome.left.items())
        what = f"{outcome.left.total()} of {self._topic} could not go anywhere and stay: {each}"
        if outcome.hidden:
            rights = [topic_right(Operation.WRITE, name) for name in sorted(outcome.hidden)]
            return MissingRightError(what, rights, self._log.principal)
        return PenstockError(f"{what}; look at them with `penstock dlq show`, or name a topic for them with --to")

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
                # A topic's limit of size holds for a batch: what fits in alone must not fail in company.
                "batch.num.messages": 1,
                "delivery.timeout.ms": _DELIVERY_S * 1000,
                "message.max.bytes": _MAX_MESSAGE_BYTES,
            },
        )

    def _run_partition(self, number: int) -> None:
        low, high = self._log.bounds(self._topic, number)
        before = replace(self._log.replayed(self._topic, number), log=range(low, high))
        if before.is_past_the_end:  # the topic was made again since
            before = Position(self._topic, number, None, before.log)
        begin = max(low, before.committed or 0)
        first, end = low if self._again else begin, high
        if self._choice.place is not None:
            first = max(low if self._choice.alone else first, self._choice.place[1])
            end = min(high, first + 1) if self._choice.alone else high
        done: Sequence[range] = before.done
        for batch in self._log.read(self._topic, number, first, end):
            acknowledged, failure = self._take(before, batch)
            # What lies between letters, as markers of transactions do, counts with the one that follows it.
            edges = [first, *(letter.offset + 1 for letter in batch)]
            first = edges[-1]
            if acknowledged and self._producer is not None:
                sent = [letter.offset in acknowledged or before.is_done(letter.offset) for letter in batch]
                done = joined((*done, *(range(*edge) for edge in compress(pairwise(edges), sent))))
                self._write_down(change(REPLAY_GROUP, before, begin, done), failure)
            if failure is not None:
                raise failure
            if self._full:
                return

    def _take(self, before: Position, batch: Sequence[DeadLetter]) -> tuple[set[int], PenstockError | None]:
        """Decide on each letter, up to the limit, and send; return as `_send`."""
        chosen: list[tuple[DeadLetter, str]] = []
        room = len(batch) if self._limit is None else self._limit - self.outcome.sent.total()
        for letter in batch:
            if len(chosen) >= room:
                break
            target = self._decide(letter, before=before.is_done(letter.offset))
            if target is not None:
                chosen.append((letter, target))
        acknowledged, failure = self._send(chosen)
        self.outcome.sent.update(target for letter, target in chosen if letter.offset in acknowledged)
        return acknowledged, failure

    def _decide(self, letter: DeadLetter, *, before: bool) -> str | None:
        """Return where a letter goes, or None; what goes nowhere is counted."""
        if before and not self._again:
            self.outcome.sent_before += 1
            return None
        if not self._choice.takes(letter):
            self.outcome.not_chosen += 1
            return None
        target = self._to or letter.origin.topic
        why = Left.NOT_COPIED if letter.is_metadata_alone else self._why_not(target)
        if why is None:
            return target
        self.outcome.left[why] += 1
        self.outcome.first_left.setdefault(why, letter.place)
        return None

    def _why_not(self, target: str | None) -> Left | None:
        """Return why nothing can go to a topic, or None."""
        if target is None or target == self._topic:
            return Left.NO_ORIGIN if target is None else Left.ITSELF
        if target not in self._asked:
            self._asked[target] = None
            try:
                self._log.partitions(target)
            except MissingRightError:
                self._asked[target] = Left.HIDDEN
                self.outcome.hidden.add(target)
            except TopicNotFoundError:
                self._asked[target] = Left.NO_TOPIC
        return self._asked[target]

    def _send(self, chosen: Sequence[tuple[DeadLetter, str]]) -> tuple[set[int], PenstockError | None]:
        """Send letters of one partition; return the offsets that were acknowledged, and the first failure."""
        # With nothing to send there is nothing that a producer which failed meanwhile has to do with.
        if (producer := self._producer) is None or not chosen:
            return {letter.offset for letter, _ in chosen}, None
        acknowledged: set[int] = set()
        failures: list[PenstockError] = []

        def delivered(letter: DeadLetter, target: str, error: KafkaError | None, _message: object) -> None:
            if error is None:
                acknowledged.add(letter.offset)
            else:
                failures.append(self._not_sent(letter, target, error))

        for letter, target in chosen:
            if failures:
                break  # the fewer later messages overtake the one that failed, the better
            try:
                self._produce(producer, letter, target, partial(delivered, letter, target))
            except KafkaException as error:
                failures.append(self._not_sent(letter, target, cause_of(error, producer.poll)))
        # By polls: the client's own flush loses the reason where it fails meanwhile.
        deadline = time.monotonic() + _DELIVERY_S + 5
        while len(producer) and time.monotonic() < deadline:
            try:
                producer.poll(_POLL_S)
            except KafkaException as error:  # it failed fatally, which is the reason of the others
                failures.insert(0, self._not_sent(*chosen[0], error.args[0]))
        if len(producer) and not failures:
            failures.append(self._not_sent(*chosen[0], KafkaError(KafkaError._MSG_TIMED_OUT)))  # noqa: SLF001 - a public code of the library
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
        """Return the original partition where it is known: its producer may have hashed the key another way."""
        topic, partition = letter.origin.topic, letter.origin.partition
        if topic != target or partition is None or partition >= self._log.partitions(target):
            return -1
        return partition

    def _write_down(self, what: Change, failure: PenstockError | None) -> None:
        if what.cut:
            self.outcome.forgetful.add(what.before.partition)
        try:
            self._log.remember(what)
        except PenstockError as error:
            # The next run meets the other failure again.
            raise error from failure or error.__cause__

    def _not_sent(self, letter: DeadLetter, target: str, error: KafkaError) -> PenstockError:
        what = f"{letter.place} could not be sent to {target}; what was sent is written down in group {REPLAY_GROUP}"
        remedy = "fix the cause, or pass it by with --from or --where"
        return self._log.failure(error, what, topic_right(Operation.WRITE, target), remedy)
