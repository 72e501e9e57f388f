"""Which targets take messages now: what is missing, what was refused, and what is to be tried apart for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from penstock.transactions.core.pending import Pending
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.publishing.backlog import Addressed, Backlog
from penstock.transactions.publishing.flight import GroupCommit
from penstock.transactions.publishing.publisher import NotPublishedError
from penstock.transactions.publishing.targets import NOT_KNOWN, Targets
from penstock.transactions.rationed_log import RationedLog

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks whether a topic may leave quarantine.
_RELEASE_S = 0.25


class TargetGate:
    """Judges targets for one engine. Used by its thread; times are monotonic seconds."""

    def __init__(
        self, targets: Targets, owned: Mapping[int, Backlog], quarantine: TargetQuarantine, ration: RationedLog
    ) -> None:
        self.targets = targets
        self._owned = owned
        self._ration = ration
        self.quarantine = quarantine
        # Topics that were found to be missing.
        self._absent: set[str] = set()
        self._released = time.monotonic()

    def blocking(self, messages: Sequence[Addressed]) -> str | None:
        """Name the topic for whose sake a transaction cannot be published with the others, or return None."""
        quarantine, has = self.quarantine, self.targets.has
        # Where nothing is apart that is no question; nearly all go this way.
        asks = bool(quarantine)
        for message in messages:
            topic, partition = message.topic, message.partition
            if not has(topic, 1 if partition is None else partition + 1):
                return topic
            if asks and quarantine.is_out(topic):
                return topic
        return None

    def blame(self, named: Mapping[str, str], now: float) -> None:
        """Keep topics out of the next common transactions, each for a reason."""
        for topic, why in named.items():
            is_new = not self.quarantine.is_out(topic)
            self.quarantine.suspect(topic, why, now)
            if is_new:
                self.quarantine.watch(topic, now)
            text = "topic %s does not take all that is for it: %s; what is for it is tried apart from the others"
            self._ration.warn(f"target {topic}", text, topic, why)

    def named(self, error: NotPublishedError) -> dict[str, str]:
        """Return the topics that a Kafka transaction failed for, each with the reason.

        The library fails whole batches for one message: who it is shows where each is a batch.
        """
        return {**dict(error.failed.values()), **error.targets}

    def settled(self, names: Iterable[str]) -> None:
        """Take in that transactions are settled."""
        if self.quarantine:
            for name in names:
                self.quarantine.forget(name)

    def refuse_too_large(self, error: NotPublishedError, commit: GroupCommit, now: float) -> None:
        """Take in that the only transaction of a commit does not fit into the client's buffer."""
        for entry in commit.decided():
            for topic in sorted(commit.topics())[:1]:
                self.refuse(entry.transaction_id, topic, str(error), now)
                self.quarantine.suspect(topic, str(error), now)

    def refuse(self, transaction_id: str, topic: str, why: str, now: float) -> None:
        """Take in that a topic refused a transaction."""
        if self.quarantine.refuse(transaction_id, topic, why, now):
            _log.error(
                "transaction %s is committed and refused by %s: %s; it is tried again, and holds later ones of its key "
                "and target; see `penstock tx show`, and discard it by `penstock tx discard` if it cannot be fixed",
                transaction_id,
                topic,
                why,
            )

    def missing(self, topic: str, now: float) -> str | None:
        """Say why nothing need be tried for a topic's sake: it is not there; or return None."""
        fronts = (next(iter(backlog.set_aside.fronts(topic)), None) for backlog in self._owned.values())
        for waiting in filter(None, fronts):
            why = self.targets.missing(topic, waiting.partitions_wanted(topic), now)
            if why is not None:
                if why is not NOT_KNOWN:
                    text = "transaction %s is committed and waits: topic %s %s"
                    self._ration.warn(f"target {topic}", text, waiting.transaction_id, topic, why)
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
        waiting = {topic for backlog in self._owned.values() for topic in backlog.set_aside.topics()}
        for topic in self.quarantine.release(self._has_unrefused, waiting, now):
            for backlog in self._owned.values():
                backlog.release(topic, self.quarantine.is_refused)

    def _has_unrefused(self, topic: str) -> bool:
        """Tell whether something waits for a topic's sake that was not refused."""
        return any(self.candidates(backlog, topic, 1) for backlog in self._owned.values())

    def candidates(self, backlog: Backlog, topic: str, most: int) -> list[Pending]:
        """Return what can be tried for a topic's sake in a partition, and was not refused before."""
        is_refused = self.quarantine.is_refused
        return backlog.set_aside.take(topic, most, lambda waiting: is_refused(waiting.transaction_id))

    def refused_longest(self, topic: str) -> tuple[int, Pending] | None:
        """Return the refused one of a topic that was not tried for longest, with its partition."""
        found = [
            (self.quarantine.tried_at(waiting.transaction_id), number, waiting)
            for number, backlog in self._owned.items()
            for waiting in backlog.set_aside.fronts(topic)
            if not waiting.in_flight and self.quarantine.is_refused(waiting.transaction_id)
        ]
        return min(found, key=lambda candidate: candidate[0])[1:] if found else None
