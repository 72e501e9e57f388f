"""How transactions are printed. Key, value and headers only where they are asked for; text from outside is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from penstock.cli.dlq.text import content_text, time_text
from penstock.cli.output import age_text, printable
from penstock.transactions.model import DiscardedTransaction, PendingTransaction
from penstock.transactions.operator.audit import Audited
from penstock.transactions.operator.inspection import Discarded
from penstock.transactions.stores.kafka.inspection import Found
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_STANDS = {Verdict.COMMIT: "COMMIT", Verdict.ROLLBACK: "ROLLBACK", Verdict.DISCARD: "DISCARD"}
_AUTHORS = {
    Author.PRODUCER: "its producer",
    Author.CHECK: "a check",
    Author.OPERATOR: "an operator",
    Author.COORDINATOR: "the coordinator, by the discard policy",
}


def pending_rows(found: Sequence[PendingTransaction]) -> list[tuple[str, ...]]:
    """Return the rows of `penstock tx ls`."""
    return [
        (
            transaction.transaction_id,
            printable(transaction.group),
            ", ".join(dict.fromkeys(transaction.topics)),
            age_text(transaction.age_s),
            str(transaction.check_count),
            _decided(transaction),
            _waits(transaction),
        )
        for transaction in found
    ]


def pending_as_json(transaction: PendingTransaction) -> dict[str, Any]:
    """Return a pending transaction as JSON has it."""
    decided = None if transaction.decided is None else transaction.decided.name
    return {**asdict(transaction), "decided": decided, "waits_for": _waits(transaction)}


class DiscardedEntry(NamedTuple):
    """A discarded transaction of any store, or one message of it, as far as it is printed."""

    about: DiscardedTransaction
    resumed_by: str = ""
    #: The message and its place, where the store can tell them.
    half: Half | None = None
    place: str = ""


def discarded_entry(discarded: Discarded | DiscardedTransaction) -> DiscardedEntry:
    """Return what is printed of a discarded transaction."""
    if isinstance(discarded, DiscardedTransaction):
        return DiscardedEntry(discarded)
    half = discarded.half
    about = DiscardedTransaction(
        half.transaction_id, half.group, (half.topic,), discarded.reason, discarded.check_count, discarded.at_ms
    )
    return DiscardedEntry(about, discarded.resumed_by, half, f"discarded {discarded.partition}:{discarded.offset}")


def discarded_as_json(letter: DiscardedEntry) -> dict[str, Any]:
    """Return a discarded transaction as JSON has it."""
    return {**asdict(letter.about), "resumed_by": letter.resumed_by or None}


def discarded_rows(found: Sequence[DiscardedEntry]) -> list[tuple[str, ...]]:
    """Return the rows of `penstock tx ls --discarded`."""
    return [
        (
            about.transaction_id,
            printable(about.group),
            ", ".join(dict.fromkeys(about.topics)),
            _reason(letter),
            str(about.check_count),
            time_text(about.at_ms),
        )
        for letter in found
        for about in [letter.about]
    ]


def pending_lines(
    transaction: PendingTransaction, found: Found | None = None, *, payload: bool = False
) -> Iterator[str]:
    """Return what there is to tell of a pending transaction, line by line: more where it was found in Kafka."""
    birth = "" if found is None else f"{time_text(found.pending.birth_ms)}, "
    decided = (_decided(transaction) or None) if found is None else _decision(found)
    yield f"{transaction.transaction_id}  pending"
    yield f"  group      {printable(transaction.group)}"
    yield f"  born       {birth}{age_text(transaction.age_s)} ago"
    yield f"  checks     {transaction.check_count} answered UNKNOWN"
    if decided is not None:
        yield f"  decided    {decided}"
    yield f"  waits for  {_waits(transaction)}"
    if found is None:
        yield from (f"  message    to {topic}" for topic in transaction.topics)
        return
    for half, offset in zip(found.pending.halves, found.pending.offsets, strict=True):
        yield from _half_lines(half, f"half {found.half_partition}:{offset}", payload=payload)


def _decision(found: Found) -> str | None:
    if found.pending.verdict is None:
        return None
    decision = found.decision
    by = "" if decision is None else f" by {_AUTHORS[decision.author]}"
    name = "" if decision is None or not decision.actor else f" ({printable(decision.actor)})"
    return f"{_STANDS.get(found.pending.verdict, '')}{by}{name}"


def discarded_lines(letter: DiscardedEntry, *, payload: bool) -> Iterator[str]:
    """Return what there is to tell of a discarded message, line by line."""
    about = letter.about
    yield f"{about.transaction_id}  discarded {time_text(about.at_ms)}"
    yield f"  group      {printable(about.group)}"
    yield f"  reason     {_reason(letter)}, {about.check_count} checks answered"
    if letter.half is None:
        yield from (f"  message    to {topic}" for topic in about.topics)
    else:
        yield from _half_lines(letter.half, letter.place, payload=payload)


def act_line(audited: Audited) -> str:
    """Return what an operator did, as a line."""
    act = audited.act
    why = f": {printable(act.why)}" if act.why else ""
    return f"  {time_text(audited.at_ms)}  {printable(act.what)} by {printable(act.who)}{why}"


def _reason(letter: DiscardedEntry) -> str:
    since = f"; brought back by {printable(letter.resumed_by)}" if letter.resumed_by else ""
    return f"{printable(letter.about.reason)}{since}"


def _decided(transaction: PendingTransaction) -> str:
    return "" if transaction.decided is None else transaction.decided.name


def _waits(transaction: PendingTransaction) -> str:
    if transaction.held_by is not None:
        return f"{transaction.held_by}, before it in its key"
    if transaction.waits_for == "its time" and transaction.deliver_at_ms is not None:
        return time_text(transaction.deliver_at_ms)
    return printable(transaction.waits_for) or "a decision"


def _half_lines(half: Half, place: str, *, payload: bool) -> Iterator[str]:
    part = "" if half.part is None else f", part {half.part[0]} of {half.part[1]}"
    where = half.topic if half.partition is None else f"{half.topic}[{half.partition}]"
    yield f"  message    to {where}{part}, at {place}, {len(half.value or b'')} bytes"
    if payload:
        yield f"    key      {content_text(half.key)}"
        yield f"    value    {content_text(half.value)}"
        for name, value in half.headers:
            yield f"    header   {printable(name)}  {content_text(value)}"
