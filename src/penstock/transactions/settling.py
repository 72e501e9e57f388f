"""The coordinator's loop: read what is there, ask what is due, publish what is decided.

One thread does all of it, round by round, save the Kafka transactions themselves: they have a thread of their own, one
at a time. While one is under way the next decisions are read, so the size of a group adapts to the load by itself, up
to what ends within the target latency.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from penstock.errors import StoppedError
from penstock.kafka import partition_counts, reason
from penstock.transactions.group_limit import GroupLimit
from penstock.transactions.log_tending import LogTending
from penstock.transactions.membership import Membership
from penstock.transactions.owned import Counts, OwnedPartition
from penstock.transactions.publisher import InDoubtError, NotPublishedError
from penstock.transactions.questions import Questions
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.records import Half, Verdict
from penstock.transactions.settlement import Pending, Share
from penstock.transactions.takeover import LogReader
from penstock.transactions.targets import NOT_KNOWN, Pauses, Targets
from penstock.transactions.topics import StoreTopics
from penstock.transactions.turns import Turns
from penstock.transactions.two_logs import is_out_of_range

_log = logging.getLogger("penstock.transactions")

#: Seconds the loop waits for records before it serves its membership again.
_IDLE_S = 0.05
#: Seconds it waits for records while more is to be published, but not before a while is over.
_BUSY_S = 0.001
#: Seconds between two reads while a Kafka transaction is under way.
_ALOFT_S = 0.005
#: Seconds between two looks at what is held.
_TEND_S = 5.0
_ANSWER_S = 5.0
_BACK_OFF_S = 0.2


@dataclass(frozen=True, slots=True)
class _Flight:
    """A Kafka transaction under way.

    Attributes:
        shares: what it settles, with the objects they were taken from: by the time it ends a partition may be lost, or
            lost and taken again.
    """

    shares: Mapping[int, tuple[OwnedPartition, Share]]

    def count(self) -> int:
        """Return how many transactions it settles."""
        return sum(len(share.decided) for _, share in self.shares.values())

    def topics(self) -> set[str]:
        """Return where it publishes to."""
        decided = (p for _, share in self.shares.values() for p in share.decided)
        return {half.topic for pending in decided if pending.verdict is Verdict.COMMIT for half in pending.halves}

    def size_bytes(self) -> int:
        """Return how large the messages are that it publishes."""
        return sum(len(h.value or b"") for _, share in self.shares.values() for p in share.decided for h in p.halves)


class Settling:
    """What the coordinator's thread does. Used by that thread alone.

    Args:
        bootstrap_servers: Kafka's addresses, for errors.
        topics: the store's topics.
        admin: an admin client.
        membership: which partitions are owned, and their records.
        turns: Kafka transactions.
        limit: how many decisions go into one.
        questions: checks.
        logs: tells what a transaction in doubt became.
        counts: where to count.
        ration: where to say what bad input could repeat without end.
        stopping: set when the coordinator ends.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        topics: StoreTopics,
        admin: AdminClient,
        membership: Membership,
        turns: Turns,
        limit: GroupLimit,
        questions: Questions,
        logs: LogReader,
        counts: Counts,
        ration: RationedLog,
        stopping: threading.Event,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._topics = topics
        self._admin = admin
        self._membership = membership
        self._owned = membership.owned
        self._turns = turns
        self._limit = limit
        self._flight: _Flight | None = None
        # Partitions beside whose positions the name of this coordinator stands.
        self._claimed: dict[int, OwnedPartition] = {}
        # Nothing is published before, in monotonic seconds: what was aborted is not tried again at once.
        self._not_before = 0.0
        self._questions = questions
        self._logs = logs
        self._counts = counts
        self._ration = ration
        self._stopping = stopping
        self._targets = Targets(lambda: partition_counts(admin, bootstrap_servers, _ANSWER_S), topics.prefix)
        # Transactions that their targets refused, by id.
        self._refused = Pauses()
        self._tending = LogTending(admin, topics, membership.logs, counts, ration)
        self._tended = time.monotonic()

    def round(self) -> None:
        """Do once what the coordinator does for ever."""
        if not self._turns.is_open and not self._recover():
            return
        if self._flight is not None:
            # Nothing can be published before it lands, so what comes meanwhile is read in larger pieces.
            self._land(self._flight, _ALOFT_S)
        self._membership.serve()
        # What waits to be published goes first: whoever reads all that is there reads for ever, and publishes little.
        if not self._is_crowded():
            self._read(self._patience_s())
        now = time.monotonic()
        self._tending.look(self._owned, now)
        if self._targets.is_fresh():
            self._release()
        for partition in self._owned.values():
            self._questions.ask(partition, now)
        # Neither while a Kafka transaction is under way nor while one is in doubt: tending the logs takes the end of
        # the done log for known, and what that transaction wrote there would never be looked for.
        if self._flight is None and self._turns.is_open:
            self._tending.tend(self._owned, now)
            if now - self._tended >= _TEND_S:
                self._tended = now
                self._tend()
            if now >= self._not_before:
                self._publish()

    def _patience_s(self) -> float:
        """Return how long to wait for records."""
        if self._flight is not None:
            return 0
        if not any(p.settlement.has_work for p in self._owned.values()):
            return _IDLE_S
        return _BUSY_S if time.monotonic() < self._not_before else 0

    def _is_crowded(self) -> bool:
        """Tell whether as much as the next Kafka transaction takes waits for it already."""
        under_way = 0 if self._flight is None else self._flight.count()
        return sum(p.settlement.decisions.ready for p in self._owned.values()) - under_way >= self._limit.decisions

    def _read(self, timeout_s: float) -> None:
        half_topic = self._topics.half
        # In pieces of what one Kafka transaction settles: what is read beyond that waits here instead of in the logs.
        limit = self._limit.decisions
        undecided = sum(len(p.settlement.pending) - len(p.settlement.decided) for p in self._owned.values())
        for_halves = any(p.waits_for_halves for p in self._owned.values())
        records = self._membership.logs.read(timeout_s, limit, for_halves=for_halves, full=undecided >= 2 * limit)
        now = time.monotonic()
        for message in records:
            error = message.error()
            if error is not None:
                self._ration.warn("read", "the half and op logs cannot be read: %s; trying again", reason(error))
                if is_out_of_range(error):
                    self._tending.stands_still(message, now)
                continue
            partition = self._owned.get(message.partition() or 0)
            if partition is None:
                continue
            if message.topic() == half_topic:
                partition.feed_half(message, now)
            else:
                partition.feed_op(message, now)
        for partition in self._owned.values():
            partition.note_progress(now)

    def _publish(self) -> None:
        shares: dict[int, Share] = {}
        # Each partition has its part of the group: one that is crowded does not keep the others out.
        limit = max(1, self._limit.decisions // max(1, len(self._owned)))
        for number, partition in self._owned.items():
            share = partition.share(limit, self._publishable)
            if share is not None:
                if share.decided and share.decided[0].suspect:
                    shares = {number: share}
                    break
                shares[number] = share
            elif self._claimed.get(number) is not partition:
                # Nothing to settle: what is written is who owns it now, for those who may have to take it over.
                shares[number] = partition.claim()
        if not shares:
            return
        self._flight = _Flight({number: (self._owned[number], share) for number, share in shares.items()})
        self._turns.begin(shares, self._membership.group_metadata())

    def _land(self, flight: _Flight, timeout_s: float) -> None:
        """Take in how the Kafka transaction under way ended, if it has, or does so in time."""
        landing = self._turns.land(timeout_s)
        if landing is None:
            return
        self._flight = None
        if landing.error is None:
            self._counts.groups += flight.count() > 0
            self._limit.measured(flight.count(), flight.size_bytes(), landing.took_s)
            for number, (partition, share) in flight.shares.items():
                partition.settled(share)
                self._claimed[number] = partition
            if self._targets.probing and self._targets.published(flight.topics()):
                self._release()
            self._turns.make_batches_large()
            return
        self._not_published(landing.error, flight)
        if isinstance(landing.error, InDoubtError):
            _log.warning("%s; the Kafka producers are replaced and the done log asked", landing.error)
            self._turns.discard()
        elif not landing.error.failed and not landing.error.targets:
            # A rebalance, or a broker that is not ready: the next round serves the membership first.
            self._ration.warn("aborted", "%s; it is tried again", landing.error)
            self._not_before = time.monotonic() + _BACK_OFF_S

    def _release(self) -> None:
        """Let what is held try again, save for what rests after a refusal."""
        now = time.monotonic()
        discarded_rests = self._targets.rests(self._topics.discarded, now)
        for partition in self._owned.values():
            decided = partition.settlement.decided
            partition.settlement.release_held()
            for pending in decided.values():
                rests = pending.suspect and self._refused.rests(pending.half.transaction_id, now)
                if rests or (discarded_rests and pending.verdict is Verdict.DISCARD):
                    pending.held = True

    def _publishable(self, pending: Pending) -> bool:
        """Tell whether the targets of a transaction exist, so that a missing one does not fail the whole group."""
        return all(self._has_target(half) for half in pending.halves)

    def _has_target(self, half: Half) -> bool:
        wanted = 1 if half.partition is None else half.partition + 1
        why = self._targets.takes(half.topic, wanted, time.monotonic())
        if why is not None and why is not NOT_KNOWN:
            text = "transaction %s is committed and waits: topic %s %s"
            self._ration.warn(f"target {half.topic}", text, half.transaction_id, half.topic, why)
        return why is None

    def _not_published(self, error: NotPublishedError, flight: _Flight) -> None:
        """Keep out of the next Kafka transactions what this one failed for."""
        now = time.monotonic()
        self._targets.not_published()
        for topic, why in error.targets.items():
            pause_s = self._targets.failed(topic, now)
            text = "topic %s takes no message: %s; what is for it waits, the next try is in %g s"
            self._ration.warn(f"target {topic}", text, topic, why, pause_s)
        if self._topics.discarded in error.targets:
            for _, share in flight.shares.values():
                for pending in share.decided:
                    pending.held = pending.held or pending.verdict is Verdict.DISCARD
        if error.failed:
            self._refuse(error, alone=flight.count() == 1)

    def _refuse(self, error: NotPublishedError, *, alone: bool) -> None:
        """Find those that are refused among many, and let them wait aside: each goes alone to be sure."""
        if not alone and self._turns.make_batches_smaller():
            self._ration.warn("batch refused", "%s; it is tried again in smaller batches", error)
            return
        now = time.monotonic()
        for pending in error.failed:
            pending.held = alone
            pending.suspect = True
            if alone:
                self._refused.fail(pending.half.transaction_id, now)
        what = "it waits aside and is tried again" if alone else "the others are published without it"
        self._ration.warn("refused by target", "%s; %s", error, what)

    def _recover(self) -> bool:
        """Open the Kafka producers and, where partitions are owned, learn what the last transaction became."""
        try:
            self._turns.open()
            self._targets.await_first(_ANSWER_S)
            if self._owned:
                self._counts.recoveries += 1
                starts = {number: partition.done_end for number, partition in self._owned.items()}
                found = self._logs.done(starts, starts)
                for number, partition in self._owned.items():
                    done = found[number]
                    partition.settled_in_doubt(done.end, partition.settlement.settle(done.notes, done.carries))
        except (InDoubtError, KafkaException) as error:
            text = reason(error) if isinstance(error, KafkaException) else str(error)
            _log.warning("the coordinator of %s cannot publish yet: %s; trying again", self._topics.prefix, text)
            self._turns.discard()
            self._stopping.wait(_BACK_OFF_S)
            return False
        except StoppedError:
            self._turns.discard()
            return False
        return True

    def _tend(self) -> None:
        """Let held transactions try again."""
        for partition in self._owned.values():
            partition.held = sum(p.held for p in partition.settlement.decided.values())
        self._refused.keep(name for partition in self._owned.values() for name in partition.settlement.decided)
        self._release()


__all__ = ["Settling"]
