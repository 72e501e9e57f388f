"""Which undecided transactions are due for a check, for the discard policy, or for a rollback.

A check is sent only once the op log was read up to an append time at or past the time at which it was due: what was
decided before then needs no check. Where nothing new comes, the coordinator writes a mark of its own (a TICK) into the
op log and waits until it has read it. That also tells it the broker's time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from penstock.transactions.core.discard import Discarding, Exhausted
from penstock.transactions.core.pending import Pending
from penstock.transactions.operator.description import NO_ANSWER, NO_PRODUCER
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.check_sender import CheckSender, SendOutcome
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

_log = logging.getLogger("penstock.transactions")

#: Checks sent in one round: a crowd of undecided halves delays nobody's commit.
_CHECKS = 200
#: Seconds until a check is tried again when it is not known whether anybody is there to be asked.
_SOON_S = 0.1
#: Seconds until it is looked whether some of them were answered.
_WINDOW_S = 0.02
#: Seconds between two marks in one op log.
_TICK_S = 0.5
#: Seconds after which the broker's clock is read again while something is pending.
_CLOCK_S = 30.0
#: Why a group could not be asked, for operators.
_WAITS_FOR = {SendOutcome.NOBODY: NO_PRODUCER, SendOutcome.UNKNOWN: NO_ANSWER}


class CheckScheduler:
    """Sends what is due. Used by the coordinator's thread."""

    def __init__(self, context: CoordinatorContext, sender: CheckSender, discarding: Discarding) -> None:
        self._policy, self._counts, self._ration = context.policy, context.counts, context.ration
        self._sender = sender
        self._discarding = discarding
        # By producer group that could not be asked: half partition and id of the transaction that it was to be asked
        # about, and what that waits for.
        self._unasked: dict[str, tuple[int, str, str]] = {}

    def unasked(self, owned: Mapping[int, HalfPartition]) -> dict[str, str]:
        """Return the producer groups that could not be asked, each with what its undecided transactions wait for."""
        self._unasked = {
            group: (number, name, why)
            for group, (number, name, why) in self._unasked.items()
            if number in owned and owned[number].state.undecided(name) is not None
        }
        return {group: why for group, (_, _, why) in self._unasked.items()}

    def run(self, partition: HalfPartition, now: float) -> None:
        """Send what is due in a partition that is owned; `now` is in monotonic seconds."""
        self._discarding.tend()
        self._counts.hung_checks = self._discarding.hung
        if not partition.state.pending or not partition.is_recovered:
            return
        due = partition.plan.next_due()
        time_s = partition.clock.now_ms(now) / 1000
        is_due = due is not None and due <= time_s
        # At first, what was read may be of long ago: only what is written now tells what time it is.
        clock = partition.clock
        is_unsure = partition.ticked_at < 0 or now - clock.set_at > _CLOCK_S or clock.is_disputed
        if is_unsure or (is_due and partition.feed.ops_read_to_ms / 1000 < time_s - _TICK_S):
            self._tick(partition, now)
        if is_due:
            for pending in partition.plan.take_due(min(time_s, partition.feed.ops_read_to_ms / 1000), _CHECKS):
                self._check(partition, pending, now, time_s)

    def _tick(self, partition: HalfPartition, now: float) -> None:
        if now - partition.ticked_at >= _TICK_S:
            partition.ticked_at = now
            self._sender.tick(partition.number)

    def _check(self, partition: HalfPartition, pending: Pending, now: float, time_s: float) -> None:
        plan, interval = partition.plan, self._policy.interval(pending.check_count + 1)
        if not pending.is_complete:
            self._end_incomplete(partition, pending, now)
            plan.postpone(pending, time_s + interval)
            return
        if pending.check_count >= self._policy.maximum:
            self._settle_exhausted(partition, pending, time_s)
            return
        group, unanswered = pending.half.group, pending.requested > pending.check_count
        if not plan.has_room(group, time_s):
            plan.postpone(pending, time_s)
            plan.park(group, time_s + _WINDOW_S)
            return
        asked = self._sender.check(partition, pending, now)
        if asked is SendOutcome.SENT:
            self._unasked.pop(group, None)
            plan.sent(pending, pending.requested, time_s)
            # Its question holds it now; the next one is not asked for some time.
            partition.state.payloads.let_go(pending)
            self._counts.checks += 1
            if unanswered:
                text = "the check of transaction %s was not answered within %g s by group %s: it is asked again"
                self._ration.warn(f"unanswered {group}", text, pending.half.transaction_id, interval, group)
            return
        if asked is SendOutcome.UNREAD:
            self._await_payload(partition, pending, time_s)
        elif asked is SendOutcome.REFUSED:
            # Its own fault: the others of its group are asked.
            self._counts.no_producer += 1
            plan.postpone(pending, time_s + interval)
        else:
            self._leave_alone(partition, pending, asked, time_s)

    def _leave_alone(self, partition: HalfPartition, pending: Pending, asked: SendOutcome, time_s: float) -> None:
        """Ask a group nothing for a while, for nobody is there, or it is not known yet whether somebody is."""
        plan, group = partition.plan, pending.half.group
        plan.postpone(pending, time_s)
        if asked in _WAITS_FOR:
            waits_for = _WAITS_FOR[asked].format(group)
            self._unasked[group] = partition.number, pending.half.transaction_id, waits_for
        if asked is not SendOutcome.NOBODY:
            self._counts.no_producer += asked is SendOutcome.UNKNOWN
            plan.park(group, time_s + _SOON_S)
            return
        # One question for all of a group: it is left alone, and costs nothing, until it is looked for again.
        self._counts.no_producer += 1 + plan.park(group, time_s + self._policy.interval_s)
        text = "no producer of group %s answers the check of transaction %s; start one with a check function"
        self._ration.warn(f"nobody {group}", text, group, pending.half.transaction_id)

    def _end_incomplete(self, partition: HalfPartition, pending: Pending, now: float) -> None:
        """Roll a transaction back whose halves cannot all come any more: its local transaction never began."""
        until_ms = pending.birth_ms + self._policy.incomplete_s * 1000
        if partition.feed.halves_read_to_ms < until_ms and not partition.feed.is_at_end(now):
            return
        _log.error(
            "transaction %s of group %s is rolled back: not all of its halves are there, or they contradict",
            pending.half.transaction_id,
            pending.half.group,
        )
        self._sender.decide(partition.number, pending, Verdict.ROLLBACK)

    def _settle_exhausted(self, partition: HalfPartition, pending: Pending, time_s: float) -> None:
        if self._discarding.reads_halves and pending.dropped is not None:
            self._await_payload(partition, pending, time_s)
            return
        half = pending.half
        # By id: what waits for a slow policy does not keep in memory what is settled meanwhile.
        first = partial(_undecided_half, partition, half.transaction_id)
        decide = partial(self._decide, partition, half.transaction_id)
        self._discarding.settle(Exhausted(half.transaction_id, half.group, pending.check_count, first, decide))
        partition.plan.postpone(pending, time_s + self._policy.interval(pending.check_count + 1))

    def _await_payload(self, partition: HalfPartition, pending: Pending, time_s: float) -> None:
        """Have a payload read that a question needs: it comes up again as soon as it is there."""
        plan = partition.plan
        if partition.state.payloads.want(pending):
            plan.await_payload(pending, time_s + self._policy.interval(pending.check_count + 1))
        else:
            # As many as may be are being read.
            plan.postpone(pending, time_s)
            plan.park(plan.turn_of(pending), time_s + _WINDOW_S)

    def _decide(self, partition: HalfPartition, transaction_id: str, verdict: Verdict) -> None:
        """Store what the discard policy said; also called by its threads."""
        pending = partition.state.undecided(transaction_id)
        if pending is not None:
            self._sender.decide(partition.number, pending, verdict)


def _undecided_half(partition: HalfPartition, transaction_id: str) -> Half | None:
    pending = partition.state.undecided(transaction_id)
    # One whose payload was dropped meanwhile comes up again.
    return None if pending is None or pending.dropped is not None else pending.half
