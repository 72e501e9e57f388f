"""Why transactions are not published, or not checked, by what the coordinators tell of themselves. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.transactions.core.pending import Pending
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.description import described
from penstock.transactions.stores.kafka.coordinator.status import Status
from penstock.transactions.wire.ops import Verdict

#: Rights without which things are published all the same: to delete from logs, to see who can be asked.
_HARMLESS = ("Delete", "Describe")


class Obstacle(NamedTuple):
    """What stands in the way of one transaction: what it waits for in words."""

    text: str
    #: Whether its target takes it not, or an earlier one of its key: then an operator may discard it.
    by_target: bool = False


def obstacles(
    half_partition: int, every: Iterable[Pending], statuses: Sequence[Status], now_ms: float
) -> dict[str, Obstacle]:
    """Return, by id, what stands in the way of transactions among those pending in one half partition.

    Of each coordinator the latest status counts; the time is in milliseconds since the epoch.
    """
    refused = _merged(status.refused for status in statuses)
    refusing = [status for status in statuses if status.targets or status.refused]
    slow = next((status for status in statuses if status.slow_call and half_partition in status.partitions), None)
    hanging = None if slow is None else Obstacle(_hanging(slow, now_ms))
    lacking = _lacking(half_partition, statuses)
    # By key and target: the first refused one, or the last one behind it that others stand behind in turn.
    blocked: dict[int, str] = {}
    every = list(every)
    unasked = _merged(status.unasked for status in statuses if half_partition in status.partitions)
    found = {
        pending.half.transaction_id: Obstacle(unasked[pending.half.group])
        for pending in every
        if pending.verdict is None and pending.half.group in unasked
    }
    decided = (pending for pending in every if pending.verdict is not None)
    for pending in sorted(decided, key=lambda pending: (pending.decided_at, pending.decided_index)):
        transaction_id = pending.half.transaction_id
        obstacle = None
        if pending.verdict is Verdict.COMMIT:
            lines = pending.keys
            why = target_text(transaction_id, [half.topic for half in pending.halves], refusing)
            obstacle = Obstacle(why, by_target=True) if why else None
            if obstacle is None:
                before = next((blocked[line] for line in lines if line in blocked), None)
                if before is not None:
                    obstacle = Obstacle(f"{before}, before it in its key and target", by_target=True)
            if transaction_id in refused or (obstacle is not None and not why):
                blocked.update((line, transaction_id) for line in lines if line not in blocked)
        obstacle = obstacle or lacking or hanging
        if obstacle is not None:
            found[transaction_id] = obstacle
    return found


def status_lines(statuses: Iterable[Status], now_ms: float) -> list[str]:
    """Return what the coordinators tell, a line for each thing that is the matter."""
    lines: list[str] = []
    for status in statuses:
        lines.extend(
            f"topic {topic} takes nothing now, as coordinator {status.coordinator} tells: {why}"
            for topic, why in sorted(status.targets.items())
        )
        lines.extend(f"coordinator {status.coordinator} tells: {why}" for why in dict.fromkeys(status.rights.values()))
        lines.extend(f"checks of coordinator {status.coordinator} wait for {why}" for why in status.unasked.values())
        if status.slow_call:
            lines.append(_hanging(status, now_ms))
        if status.left_behind:
            calls = "a call" if status.left_behind == 1 else f"{status.left_behind} calls"
            lines.append(f"Kafka: {calls} of coordinator {status.coordinator} never returned and went without")
    return lines


def _lacking(half_partition: int, statuses: Sequence[Status]) -> Obstacle | None:
    """Return what keeps a partition's coordinator from publishing; or what keeps any from having the partition."""
    owner = next((status for status in statuses if half_partition in status.partitions), None)
    reporting = [owner] if owner is not None else [status for status in statuses if not status.partitions]
    lacking = (right for status in reporting for right in status.rights.items())
    why = next((why for name, why in lacking if not name.startswith(_HARMLESS)), None)
    return None if why is None else Obstacle(f"a right of its coordinator: {why}")


def target_text(transaction_id: str, topics: Iterable[str], statuses: Sequence[Status]) -> str:
    """Return what a transaction waits for where its target does not take it, as coordinators tell; empty: it does."""
    topics = list(dict.fromkeys(topics))
    why = next((status.refused[transaction_id] for status in statuses if transaction_id in status.refused), None)
    if why is not None:
        return f"topic {', '.join(topics)} to take it: {why}"
    reasons = (reasons for status in statuses for reasons in (status.targets, status.refusing))
    return next((f"topic {name} to take it: {each[name]}" for each in reasons for name in topics if name in each), "")


def _hanging(status: Status, now_ms: float) -> str:
    # It has gone on hanging since the status was written.
    age_s = status.slow_call_s + max(0.0, now_ms - status.at_ms) / 1000
    return f"Kafka: {status.slow_call} of coordinator {status.coordinator} has not returned for {age_s:.0f} s"


def _merged(reasons: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {name: why for each in reasons for name, why in each.items()}


def described_pending(
    pending: Pending, now_ms: float, obstacle: str, *, held_by: str | None = None, missing: Collection[str] = ()
) -> PendingTransaction:
    """Return a pending transaction as an operator sees it; arguments are those of `described`."""
    return described(
        pending.half.transaction_id,
        pending.half.group,
        [half.topic for half in pending.halves],
        birth_ms=pending.birth_ms,
        now_ms=now_ms,
        check_count=pending.check_count,
        verdict=pending.verdict,
        deliver_at_ms=pending.half.deliver_at_ms,
        held_by=held_by,
        is_complete=pending.is_complete,
        missing=missing,
        obstacle=obstacle,
        unasked=obstacle,
    )
