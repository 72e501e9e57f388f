"""Trials: transactions that cannot be published with the others are published separately.

After a failure the engine reports here what a Kafka transaction failed for. `core.quarantine` says what is tried when.
Each partition keeps its waiting transactions, in the order of their keys. Used by the engine's thread; times are
monotonic seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.publishing.group_commit import Backlog, GroupCommit
from penstock.transactions.publishing.publisher import NotPublishedError, TooLargeError
from penstock.transactions.publishing.targets import NOT_KNOWN, Targets
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.ops import Verdict

_log = logging.getLogger("penstock.transactions")

#: Seconds between two trials while the coordinator itself lacks a right.
LACKING_S = 1.0
#: Seconds between two looks whether a topic may leave quarantine.
_RELEASE_INTERVAL_S = 0.25
#: Most bytes of messages in one trial.
_MAX_BYTES = 4 << 20
_NO_END = (
    "the broker cannot end a Kafka transaction there: its max.message.bytes may be smaller than the marker that ends "
    "one; correct that, and restart the broker that leads it"
)
# Looking up a member of an enumeration is slow, and every transaction comes through here.
_DISCARD = Verdict.DISCARD


class Trials:
    """Chooses what is tried separately, and takes the outcomes. `discarded` is the topic of discarded messages."""

    def __init__(self, targets: Targets, owned: Mapping[int, Backlog], discarded: str) -> None:
        self._targets = targets
        self._owned = owned
        self._discarded = discarded
        self._ration = RationedLog()
        self.quarantine = TargetQuarantine()
        # Topics that were missing.
        self._absent: set[str] = set()
        self._released = time.monotonic()

    # Leaving transactions out of the common Kafka transactions, and letting them in again.

    def blocking(self, pending: Pending) -> str | None:
        """Return the topic that keeps a transaction out of the common Kafka transactions, or None.

        A transaction whose payload is neither in memory nor at hand is read again and tried separately.
        """
        quarantine, counts = self.quarantine, self._targets.counts
        is_discarded = pending.verdict is _DISCARD
        halves = (pending.half,) if is_discarded or pending.parts is None else pending.halves
        for half in halves:
            topic, partition = (self._discarded, None) if is_discarded else (half.topic, half.partition)
            if counts.get(topic, 0) <= (partition or 0) or (quarantine.topics and quarantine.is_out(topic)):
                return topic
        if pending.dropped is None or pending.is_at_hand:
            return None
        return self._discarded if is_discarded else pending.half.topic

    def blame(self, named: Mapping[str, str], now: float) -> None:
        """Put topics in quarantine, each with a reason."""
        for topic, why in named.items():
            is_new = not self.quarantine.is_out(topic)
            self.quarantine.suspect(topic, why, now)
            if is_new:
                self.quarantine.watch(topic, now)
            text = "topic %s does not take all its messages: %s; they are tried separately from the others"
            self._ration.warn(f"target {topic}", text, topic, why)

    def settled(self, names: Iterable[str]) -> None:
        """Forget settled transactions."""
        if self.quarantine:
            for name in names:
                self.quarantine.forget(name)

    def refuse_too_large(self, commit: GroupCommit, error: NotPublishedError, now: float) -> None:
        """Note that the only transaction of a common commit does not fit into the client's buffer."""
        for topic in sorted(commit.topics())[:1]:
            self._refuse(commit, dict.fromkeys(commit.names(), str(error)), topic, now)
            self.quarantine.suspect(topic, str(error), now)

    def _refuse(self, commit: GroupCommit, reasons: Mapping[str, str], topic: str, now: float) -> None:
        """Note the transactions of a commit that a topic refused, given the reasons by id."""
        for name in commit.names():
            if name in reasons and self.quarantine.refuse(name, topic, reasons[name], now):
                _log.error(
                    "transaction %s is committed and refused by %s: %s; it is tried again, and holds later ones of its "
                    "key and target; see `penstock tx show`, and discard it by `penstock tx discard` if it cannot be "
                    "fixed",
                    name,
                    topic,
                    reasons[name],
                )

    def release(self, now: float) -> None:
        """Let topics that are well again leave quarantine, and try at once those that have come back."""
        if now - self._released < _RELEASE_INTERVAL_S or not self.quarantine:
            return
        self._released = now
        if self._absent:
            self._targets.look(now)
            for topic in [topic for topic in self._absent if self._targets.has(topic, 1)]:
                self._absent.discard(topic)
                self.quarantine.try_now(topic, now)
        for topic in self.quarantine.release(self._has_unrefused, self.waiting(), now):
            for backlog in self._owned.values():
                backlog.release(topic, self.quarantine.is_refused)

    def _has_unrefused(self, topic: str) -> bool:
        return any(self._unrefused(backlog, topic, 1) for backlog in self._owned.values())

    def _unrefused(self, backlog: Backlog, topic: str, most: int) -> list[Pending]:
        """Return transactions that wait for a topic and were not refused."""
        is_refused = self.quarantine.is_refused
        return backlog.set_aside.take(topic, most, lambda waiting: is_refused(waiting.transaction_id))

    # Choosing the next trial.

    def waiting(self) -> set[str]:
        """Return the topics with a transaction that could be tried."""
        return {topic for backlog in self._owned.values() for topic in backlog.set_aside.topics()}

    def next_commit(self, topic: str, under_way: Callable[[], set[str]], now: float) -> GroupCommit | None:
        """Return the next trial for a topic, marked as under way, or None.

        `under_way` returns the targets of the common transaction, whose messages come first.
        """
        missing = self._missing(topic, now)
        if missing is NOT_KNOWN:
            self.quarantine.postpone(topic, now)
            return None
        if missing is not None:
            self._absent.add(topic)
            self.quarantine.fail(topic, missing, now)
            return None
        candidates = self._candidates(topic, self.quarantine.begin_try(topic, now), now)
        batches: dict[int, DecidedBatch] = {}
        try:
            # A message that entered quarantine while others for its target were under way comes behind them. A refused
            # one stood behind nothing at its first trial, and holds later ones since.
            is_refused = self.quarantine.is_refused
            others = [entry for group in candidates.values() for entry in group if not is_refused(entry.transaction_id)]
            targets = {target for entry in others for target in entry.topics}
            if targets.isdisjoint(under_way()):
                batches = self._batches(candidates)
                if not batches:
                    self.quarantine.postpone(topic, now)
        finally:
            if not batches:
                # Also if the store fails for a moment: the topic is tried again.
                self.quarantine.end_try(topic)
        return GroupCommit.of(self._owned, batches, topic) if batches else None

    def _missing(self, topic: str, now: float) -> str | None:
        """Return why a topic is missing, if a trial waits for it, else None."""
        fronts = (next(iter(backlog.set_aside.fronts(topic)), None) for backlog in self._owned.values())
        for waiting in filter(None, fronts):
            why = self._targets.missing(topic, waiting.partitions_wanted(topic), now)
            if why is not None:
                if why is not NOT_KNOWN:
                    text = "transaction %s is committed and waits: topic %s %s"
                    self._ration.warn(f"target {topic}", text, waiting.transaction_id, topic, why)
                return why
        return None

    def _candidates(self, topic: str, width: int, now: float) -> dict[int, list[Pending]]:
        """Return what to try for a topic: one refused transaction alone, or up to `width` that were not refused."""
        if self.quarantine.retries(topic, now) and (refused := self._refused_longest(topic)) is not None:
            return refused
        candidates: dict[int, list[Pending]] = {}
        for number, backlog in self._owned.items():
            entries = self._unrefused(backlog, topic, width)
            width -= len(entries)
            if entries:
                candidates[number] = entries
            if width <= 0:
                break
        return candidates

    def _refused_longest(self, topic: str) -> dict[int, list[Pending]] | None:
        """Return the refused transaction of a topic whose last trial is the oldest, by its partition."""
        candidates = [
            (self.quarantine.tried_at(waiting.transaction_id), number, waiting)
            for number, backlog in self._owned.items()
            for waiting in backlog.set_aside.fronts(topic)
            if not waiting.in_flight and self.quarantine.is_refused(waiting.transaction_id)
        ]
        if not candidates:
            return None
        _, number, waiting = min(candidates, key=lambda candidate: candidate[0])
        return {number: [waiting]}

    def _batches(self, candidates: Mapping[int, list[Pending]]) -> dict[int, DecidedBatch]:
        """Return the candidates whose payloads are there, up to a limit of bytes, but at least one."""
        batches: dict[int, DecidedBatch] = {}
        chosen: list[int] = []

        def fits(entry: Pending) -> bool:
            chosen.append(entry.payload_bytes)
            return len(chosen) == 1 or sum(chosen) <= _MAX_BYTES

        for number, entries in candidates.items():
            batch = self._owned[number].trial(entries, fits)
            if batch is not None:
                batches[number] = batch
        return batches

    # Outcomes.

    def succeeded(self, commit: GroupCommit, now: float) -> None:
        """Note that a trial was published."""
        self.quarantine.end_try(commit.topic)
        self.quarantine.succeeded(commit.topic, commit.names(), now)

    def failed(self, commit: GroupCommit, error: NotPublishedError, now: float) -> None:
        """Note that a trial was not published, and blame its cause."""
        topic, quarantine = commit.topic, self.quarantine
        quarantine.end_try(topic)
        if isinstance(error, TooLargeError) and commit.count() == 1:
            self._refuse(commit, dict.fromkeys(commit.names(), str(error)), topic, now)
        elif error.failed:
            self._refuse(commit, {name: why for name, (_, why) in error.failed.items()}, topic, now)
        elif error.rights:
            # Not the topic's fault. The coordinator has logged the missing right.
            quarantine.postpone(topic, now + LACKING_S)
        else:
            for other, other_why in error.targets.items():
                if other != topic:
                    quarantine.suspect(other, other_why, now)
                    _refile(commit, other)
            if not error.targets or topic in error.targets:
                why = error.targets.get(topic, str(error))
                pause_s = quarantine.fail(topic, why, now)
                text = "topic %s takes no message: %s; its messages wait, the next trial is in %g s"
                self._ration.warn(f"target {topic}", text, topic, why, pause_s)

    def ended(self, topic: str, now: float, *, could_end: bool) -> None:
        """Note whether the broker could end the last Kafka transaction with messages for a topic.

        An end that missed our time limit once may succeed the next time.
        """
        if could_end:
            self.quarantine.passed(topic, _NO_END, now)
        else:
            self.quarantine.fail(topic, _NO_END, now)


def _refile(commit: GroupCommit, topic: str) -> None:
    """Let the transactions of a commit with messages for a topic wait for it: it caused the failure."""
    for backlog, batch in commit.batches.values():
        for entry in batch.decided:
            if topic in entry.topics:
                backlog.set_aside.refile(entry.transaction_id, topic)
