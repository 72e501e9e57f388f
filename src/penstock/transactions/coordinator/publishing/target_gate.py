"""Which targets take messages now: what is missing, what was refused, and what is to be tried apart for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from penstock.transactions.coordinator.partitions.half_partition import HalfPartition
from penstock.transactions.coordinator.publishing.group_commit import GroupCommit
from penstock.transactions.coordinator.publishing.publisher import NotPublishedError
from penstock.transactions.coordinator.publishing.targets import NOT_KNOWN, Targets
from penstock.transactions.coordinator.state.judgement import NEED_ALL
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.target_quarantine import TargetQuarantine

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks whether a topic may leave quarantine.
_RELEASE_S = 0.25

# A member of an enumeration is dear to look up, and this is the way of every transaction.
_DISCARD = Verdict.DISCARD


class TargetGate:
    """Judges targets for one coordinator. Used by its thread; times are monotonic seconds."""

    def __init__(
        self, topics: StoreTopics, targets: Targets, owned: Mapping[int, HalfPartition], ration: RationedLog
    ) -> None:
        self._topics = topics
        self.targets = targets
        self._owned = owned
        self._ration = ration
        self.quarantine = TargetQuarantine()
        # Topics that were found to be missing.
        self._absent: set[str] = set()
        self._released = time.monotonic()

    def blocking(self, pending: Pending) -> str | None:
        """Name the topic for whose sake a transaction cannot be published with the others, or return None."""
        quarantine = self.quarantine
        if not quarantine and pending.parts is None and pending.verdict is not _DISCARD:
            # What the rest says where nothing rests; nearly all go this way.
            half = pending.half
            has_it = self.targets.has(half.topic, 1 if half.partition is None else half.partition + 1)
            return None if has_it else half.topic
        if pending.verdict is Verdict.DISCARD:
            return self._topics.discarded if quarantine.is_out(self._topics.discarded) else None
        for half in pending.halves:
            # One whose payload is not in memory has no size: it is looked at again once it is there.
            wanted = 1 if half.partition is None else half.partition + 1
            if not self.targets.has(half.topic, wanted) or quarantine.is_out(half.topic):
                return half.topic
            if quarantine and quarantine.is_too_large(half.topic, size_of(half)):
                # With those that are under way to the topic it must not change places.
                quarantine.suspect(half.topic, quarantine.why(half.topic), time.monotonic())
                return half.topic
        return None

    def blame(self, named: Mapping[str, str], now: float) -> None:
        """Keep topics out of the next common transactions, each for a reason."""
        for topic, why in named.items():
            self.quarantine.suspect(topic, why, now)
            text = "topic %s does not take all that is for it: %s; what is for it is tried apart from the others"
            self._ration.warn(f"target {topic}", text, topic, why)

    def named(self, error: NotPublishedError, commit: GroupCommit) -> dict[str, str]:
        """Return the topics that a Kafka transaction failed for, each with the reason."""
        named = dict(error.targets)
        for pending in commit.decided():
            why = error.failed.get(pending.half.transaction_id)
            if why is not None:
                # The library fails whole batches for one message: who it is shows where each is a batch.
                named.setdefault(self.target_of(pending), why)
        return named

    def all_targets(self, error: NotPublishedError, commit: GroupCommit) -> dict[str, str]:
        """Return all that a Kafka transaction publishes to, blamed for an error that names nobody."""
        return {self.target_of(pending): str(error) for pending in commit.decided() if pending.verdict in NEED_ALL}

    def target_of(self, pending: Pending) -> str:
        """Return where a transaction goes: of several messages, the first one's target."""
        return self._topics.discarded if pending.verdict is Verdict.DISCARD else pending.half.topic

    def settled(self, transaction_ids: Iterable[str]) -> None:
        """Take in that transactions are settled."""
        if self.quarantine:
            for transaction_id in transaction_ids:
                self.quarantine.forget(transaction_id)

    def refuse_too_large(self, error: NotPublishedError, commit: GroupCommit, now: float) -> None:
        """Take in that transactions do not fit into the client's buffer, not even alone."""
        for pending in commit.decided():
            topic = self.target_of(pending)
            self.refuse(pending.half.transaction_id, topic, str(error), now)
            self.quarantine.suspect(topic, str(error), now)

    def refuse(self, transaction_id: str, topic: str, why: str, now: float, too_large: int | None = None) -> None:
        """Take in that a topic refused a transaction; `too_large` is its size in bytes, where that was the reason."""
        if self.quarantine.refuse(transaction_id, topic, why, now, too_large):
            _log.error(
                "transaction %s is committed and refused by %s: %s; it is tried again, and holds later ones of its key "
                "and target; see `penstock tx show`, and discard it by `penstock tx discard` if it cannot be mended",
                transaction_id,
                topic,
                why,
            )

    def without_too_large(self, chosen: list[Pending], now: float) -> list[Pending]:
        """Leave out what is as large as one that was refused for its size, and what stands behind it."""
        for at, pending in enumerate(chosen):
            for half in pending.halves if pending.verdict is Verdict.COMMIT else ():
                if self.quarantine.is_too_large(half.topic, size_of(half)):
                    why = self.quarantine.why(half.topic)
                    self.refuse(pending.half.transaction_id, half.topic, why, now, size_of(half))
                    return chosen[:at]
        return chosen

    def missing(self, topic: str, now: float) -> str | None:
        """Say why nothing need be tried for a topic's sake: it is not there; or return None."""
        return next(filter(None, (self._missing_for(topic, one, now) for one in self._owned.values())), None)

    def _missing_for(self, topic: str, partition: HalfPartition, now: float) -> str | None:
        pending = next(iter(partition.state.queue.set_aside.fronts(topic)), None)
        for half in pending.halves if pending is not None and pending.verdict is Verdict.COMMIT else ():
            wanted = 1 if half.partition is None else half.partition + 1
            why = self.targets.missing(half.topic, wanted, now)
            if why is not None and half.topic == topic:
                if why is not NOT_KNOWN:
                    text = "transaction %s is committed and waits: topic %s %s"
                    self._ration.warn(f"target {topic}", text, half.transaction_id, topic, why)
                return why
        return None

    def is_absent(self, topic: str, why: str, now: float) -> None:
        """Take in that a topic is not there."""
        self._absent.add(topic)
        self.quarantine.fail(topic, why, now)

    def release(self, now: float) -> None:
        """Let topics out of quarantine that are well again, and try those at once that have come back."""
        if now - self._released < _RELEASE_S or not self.quarantine:
            return
        self._released = now
        if self._absent:
            self.targets.look(now)
            for topic in [topic for topic in self._absent if self.targets.has(topic, 1)]:
                self._absent.discard(topic)
                self.quarantine.try_now(topic, now)
        for topic in self.quarantine.release(self._has_unrefused, now):
            for partition in self._owned.values():
                partition.state.queue.release(topic)

    def _has_unrefused(self, topic: str) -> bool:
        """Tell whether something waits for a topic's sake that was not refused."""
        return any(self.candidates(partition, topic, 1) for partition in self._owned.values())

    def candidates(self, partition: HalfPartition, topic: str, most: int) -> list[Pending]:
        """Return what can be tried for a topic's sake in a partition, and was not refused before."""
        is_refused = self.quarantine.is_refused
        return partition.state.queue.set_aside.take(
            topic, most, lambda pending: is_refused(pending.half.transaction_id)
        )

    def refused_longest(self, topic: str) -> tuple[int, Pending] | None:
        """Return the refused one of a topic that was not tried for longest, with its partition."""
        found = [
            (self.quarantine.tried_at(pending.half.transaction_id), number, pending)
            for number, partition in self._owned.items()
            for pending in partition.state.queue.set_aside.fronts(topic)
            if not pending.in_flight and self.quarantine.is_refused(pending.half.transaction_id)
        ]
        return min(found, key=lambda one: one[0])[1:] if found else None


def size_of(half: Half) -> int:
    """Return the bytes of a message as the broker judges it, about."""
    return len(half.key or b"") + len(half.value or b"") + sum(len(n) + len(v or b"") for n, v in half.headers)
