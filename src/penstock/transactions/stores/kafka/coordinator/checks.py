"""The check scheduler: sends due checks, applies the discard policy, rolls incomplete transactions back.

A check is sent only after the op log is read up to an append time at or past the check's due time: a transaction that
was decided before needs no check. If no new records come, the coordinator writes a mark (TICK) into the op log and
waits until it has read the mark. The mark also carries the broker's time. A check is sent only to a group with a live
producer. So a group that is down for hours spends no checks, and does not find many stale requests at its return.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.factory import AdminClient
from penstock.clients.groups import describe_groups
from penstock.clients.kafka_errors import code_of, reason
from penstock.clients.rights import Operation, group_right
from penstock.transactions.core.discard import Discarding, Exhausted
from penstock.transactions.core.pending import Pending
from penstock.transactions.operator.administration import NO_ANSWER, NO_PRODUCER
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.coordinator_sends import CoordinatorSends
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

_log = logging.getLogger("penstock.transactions")

#: Seconds for which an answer about the live producers of a group is valid; and seconds to wait for an answer.
_LIVENESS_VALID_S = 1.0
_ANSWER_S = 5.0
#: Checks sent in one round at most: many undecided halves must not delay commits.
_CHECKS = 200
#: Seconds until a check is tried again while it is not known whether its group has a producer.
_RETRY_DELAY_S = 0.1
#: Seconds until a group or a read is tried again that has too many open requests.
_WINDOW_POLL_S = 0.02
#: Seconds between two marks in one op log.
_MARK_INTERVAL_S = 0.5
#: Seconds after which the broker's clock is read again while transactions are pending.
_CLOCK_INTERVAL_S = 30.0


class Liveness:
    """Knows which producer groups have a live producer. Used by the coordinator's thread; never waits."""

    def __init__(self, context: CoordinatorContext, make_admin: Callable[[], AdminClient]) -> None:
        self._context, self._topics = context, context.topics
        self._make_admin, self._admin = make_admin, make_admin()
        # By producer group: the time of the last answer, and whether a producer is alive.
        self._alive: dict[str, tuple[float, bool]] = {}
        # By producer group: since when there is no usable answer, and the running request.
        self._asked: dict[str, tuple[float, Future[Any]]] = {}

    def hindrance(self, group: str, now: float) -> str | None:
        """Return what the checks of a group wait for; None if it has a live producer, empty if that is not known."""
        hindrance, cause = "", ""
        since, future = self._asked.get(group, (now, None))
        if future is not None and future.done():
            del self._asked[group]
            alive = self._has_members(future, self._topics.checkers(group))
            if alive is not None:
                self._alive[group], since = (now, alive), now
            elif isinstance(error := future.exception(), KafkaException):
                cause = f" ({reason(error)})"
        if now - since > _ANSWER_S:
            text = (
                "the producers of group %s are not checked: no broker said within %g s whether one runs%s; see whether "
                "the brokers run"
            )
            self._context.ration.warn(f"unknown {group}", text, group, _ANSWER_S, cause)
            self._asked.clear()
            hindrance, since = NO_ANSWER.format(group), now
            with suppress(KafkaException):  # without a token for a new client, the old client asks again
                self._admin = self._make_admin()
        learnt, alive = self._alive.get(group, (None, False))
        if learnt is not None and now - learnt < _LIVENESS_VALID_S:
            return None if alive else NO_PRODUCER.format(group)
        if group not in self._asked:
            name = self._topics.checkers(group)
            self._asked[group] = since, describe_groups(self._admin, [name])[name]
        return hindrance

    def _has_members(self, answer: Future[Any], group: str) -> bool | None:
        """Return whether the group has members, by the broker's answer; None if that is not known."""
        error, right = answer.exception(), group_right(group, Operation.DESCRIBE)
        if error is None:
            self._context.rights.granted(right)
            return bool(answer.result().members)
        if not isinstance(error, KafkaException):
            return None
        if code_of(error) == KafkaError.GROUP_ID_NOT_FOUND:
            return False
        self._context.note_missing_right(
            error, "it is not known whether a producer is alive, so no check is sent", right
        )
        return None


class CheckScheduler:
    """Handles due transactions. Used by the coordinator's thread."""

    def __init__(
        self, context: CoordinatorContext, liveness: Liveness, sends: CoordinatorSends, discarding: Discarding
    ) -> None:
        self._policy, self._counts, self._ration = context.policy, context.counts, context.ration
        self._liveness = liveness
        self._sends = sends
        self._discarding = discarding
        # By producer group that could not be checked: half partition and id of the transaction, and the reason.
        self._unasked: dict[str, tuple[int, str, str]] = {}

    def unasked(self, owned: Mapping[int, HalfPartition]) -> dict[str, str]:
        """Return the producer groups that could not be checked, each with the reason."""
        self._unasked = {
            group: (number, name, why)
            for group, (number, name, why) in self._unasked.items()
            if number in owned and owned[number].state.undecided(name) is not None
        }
        return {group: why for group, (_, _, why) in self._unasked.items()}

    def run(self, partition: HalfPartition, now: float) -> None:
        """Handle the due transactions of an owned partition; `now` is in monotonic seconds."""
        if not partition.state.pending or not partition.is_recovered:
            return
        due = partition.plan.next_due()
        time_s = partition.clock.now_ms(now) / 1000
        is_due = due is not None and due <= time_s
        # The records read first may be old: only a new record shows the present time.
        clock = partition.clock
        is_unsure = partition.ticked_at < 0 or now - clock.set_at > _CLOCK_INTERVAL_S or clock.is_disputed
        is_behind = is_due and partition.feed.ops_read_to_ms / 1000 < time_s - _MARK_INTERVAL_S
        if (is_unsure or is_behind) and now - partition.ticked_at >= _MARK_INTERVAL_S:
            partition.ticked_at = now
            self._sends.tick(partition.number)
        if is_due:
            for pending in partition.plan.take_due(min(time_s, partition.feed.ops_read_to_ms / 1000), _CHECKS):
                self._check(partition, pending, now, time_s)

    def _check(self, partition: HalfPartition, pending: Pending, now: float, time_s: float) -> None:
        plan, group = partition.plan, pending.half.group
        if not pending.is_complete:
            self._end_incomplete(partition, pending, now)
            plan.postpone(pending, time_s + self._policy.interval(pending.check_count + 1))
        elif pending.check_count >= self._policy.maximum:
            self._settle_exhausted(partition, pending, time_s)
        elif not plan.has_room(group, time_s):
            plan.postpone(pending, time_s)
            plan.park(group, time_s + _WINDOW_POLL_S)
        elif (hindrance := self._liveness.hindrance(group, now)) is not None:
            self._leave_alone(partition, pending, hindrance, time_s)
        elif pending.dropped is not None:
            self._await_payload(partition, pending, time_s)
        else:
            self._ask(partition, pending, time_s)

    def _ask(self, partition: HalfPartition, pending: Pending, time_s: float) -> None:
        plan, interval, group = partition.plan, self._policy.interval(pending.check_count + 1), pending.half.group
        is_unanswered = pending.requested > pending.check_count
        try:
            is_sent = self._sends.ask(partition.number, pending)
        except KafkaException as error:
            # The cause is this record; other transactions of the group are still checked.
            self._counts.no_producer += 1
            plan.postpone(pending, time_s + interval)
            if self._ration.is_due(f"uncheckable {pending.transaction_id}"):
                _log.error(
                    "transaction %s of group %s, of %d bytes, cannot be asked about: the client library refused the "
                    "check request: %s; if it is too large, raise or leave out the coordinator's message.max.bytes, or "
                    "settle it by `penstock tx commit` or `rollback`",
                    pending.transaction_id,
                    group,
                    pending.size_bytes,
                    reason(error),
                )
            return
        if not is_sent:
            self._leave_alone(partition, pending, "", time_s)
            return
        self._unasked.pop(group, None)
        plan.sent(pending, pending.requested, time_s)
        # The request holds the payload now; the next check comes much later.
        partition.state.payloads.drop_if_short(pending)
        self._counts.checks += 1
        if is_unanswered:
            text = "the check of transaction %s was not answered within %g s by group %s: it is asked again"
            self._ration.warn(f"unanswered {group}", text, pending.half.transaction_id, interval, group)

    def _leave_alone(self, partition: HalfPartition, pending: Pending, hindrance: str, time_s: float) -> None:
        """Pause the checks of a group that has no live producer, or for which that is not known yet."""
        plan, group = partition.plan, pending.half.group
        plan.postpone(pending, time_s)
        if hindrance:
            self._unasked[group] = partition.number, pending.half.transaction_id, hindrance
        if hindrance != NO_PRODUCER.format(group):
            self._counts.no_producer += bool(hindrance)
            plan.park(group, time_s + _RETRY_DELAY_S)
            return
        # This parks all transactions of the group; they cost nothing until the next look.
        self._counts.no_producer += 1 + plan.park(group, time_s + self._policy.interval_s)
        text = "no producer of group %s answers the check of transaction %s; start one with a check function"
        self._ration.warn(f"nobody {group}", text, group, pending.half.transaction_id)

    def _end_incomplete(self, partition: HalfPartition, pending: Pending, now: float) -> None:
        """Roll back a transaction whose halves can no longer all come: its local transaction never began."""
        until_ms = pending.birth_ms + self._policy.incomplete_s * 1000
        if partition.feed.halves_read_to_ms < until_ms and not partition.feed.is_at_end(now):
            return
        _log.error(
            "transaction %s of group %s is rolled back: not all of its halves are there, or they contradict",
            pending.half.transaction_id,
            pending.half.group,
        )
        self._sends.decide(partition.number, pending, Verdict.ROLLBACK)

    def _settle_exhausted(self, partition: HalfPartition, pending: Pending, time_s: float) -> None:
        if self._discarding.reads_halves and pending.dropped is not None:
            self._await_payload(partition, pending, time_s)
            return
        half = pending.half
        # By id: then a slow policy keeps no settled transaction in memory.
        first = partial(_undecided_half, partition, half.transaction_id)
        decide = partial(self._decide, partition, half.transaction_id)
        self._discarding.settle(Exhausted(half.transaction_id, half.group, pending.check_count, first, decide))
        partition.plan.postpone(pending, time_s + self._policy.interval(pending.check_count + 1))

    def _await_payload(self, partition: HalfPartition, pending: Pending, time_s: float) -> None:
        """Request a payload that the check needs; the transaction is due again as soon as it is read."""
        plan = partition.plan
        if partition.state.payloads.want(pending):
            plan.await_payload(pending, time_s + self._policy.interval(pending.check_count + 1))
        else:
            # The limit of concurrent payload reads is reached.
            plan.postpone(pending, time_s)
            plan.park(plan.turn_of(pending), time_s + _WINDOW_POLL_S)

    def _decide(self, partition: HalfPartition, transaction_id: str, verdict: Verdict) -> None:
        """Store the decision of the discard policy. Also called by the policy's threads."""
        pending = partition.state.undecided(transaction_id)
        if pending is not None:
            self._sends.decide(partition.number, pending, verdict)


def _undecided_half(partition: HalfPartition, transaction_id: str) -> Half | None:
    pending = partition.state.undecided(transaction_id)
    # If the payload was dropped meanwhile, the transaction is due again later.
    return None if pending is None or pending.dropped is not None else pending.half
