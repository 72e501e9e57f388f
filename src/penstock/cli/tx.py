"""`penstock tx`: pending transactions of a store, the reasons why they wait, and decisions by an operator.

Keys, values and headers are printed only with `--payload`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import Result, Table, content_text, log_to_stderr, time_text
from penstock.cli.tx_store import Store, database
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError, TransactionError
from penstock.places import counted

if TYPE_CHECKING:
    from penstock.transactions.model import PendingTransaction
    from penstock.transactions.operator.administration import Act, Administration, Discarded
    from penstock.transactions.wire.half import Half

_ROW_LIMIT = 50
#: The author of a decision in words, by the name of `Author`.
_AUTHORS = {
    "PRODUCER": "its producer",
    "CHECK": "a check",
    "OPERATOR": "an operator",
    "COORDINATOR": "the coordinator, by the discard policy",
}

TransactionId = Annotated[str, typer.Argument(metavar="ID", help="Id of the transaction.")]
TransactionIds = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of transactions.")]
Reason = Annotated[str, typer.Option("--reason", help="The reason, for the audit log.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, max=3600, help="Seconds to wait for the effect.")]


def ls(
    store: Store,
    *,
    group: Annotated[str | None, typer.Option(help="Only transactions of this producer group.")] = None,
    older_than: Annotated[
        float, typer.Option("--older-than", min=0, help="Only transactions older than so many seconds.")
    ] = 0.0,
    discarded: Annotated[bool, typer.Option("--discarded", help="Discarded transactions instead.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="With --discarded: also transactions that were brought back.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Number of rows to print, the oldest first.")] = _ROW_LIMIT,
) -> Result:
    """List pending transactions: age, checks, decision, and why they wait. It needs no running coordinator."""
    if discarded and store.file is not None:
        raise ConfigurationError(
            "the discarded transactions of a file store are in Kafka, in a topic with its prefix: use --prefix instead "
            "of --file"
        )
    notes: list[str] = []
    columns: tuple[str, ...]
    # A short wait, so that an operator soon learns that a broker is away.
    with store.open(store.connect_timeout) as opened:
        if discarded:
            before_ms = (time.time() - older_than) * 1000
            gone = [each for each in opened.discarded() if each.at_ms <= before_ms and group in {None, each.group}]
            rows = [_discarded_row(each) for each in gone if every or not each.resumed_by]
            columns = ("group", "topics", "reason", "check_count", "at_ms")
            if len(rows) < len(gone):
                notes = [f"{len(gone) - len(rows)} more were brought back; see them with --all"]
        else:
            found = [each for each in opened.pending() if each.age_s >= older_than and group in {None, each.group}]
            rows = [_pending_row(pending) for pending in found]
            columns = ("group", "topics", "age_s", "check_count", "decided", "waits_for")
            notes = opened.notices(found)
    table = Table("transactions", rows, ("transaction_id", *columns), limit=limit)
    kind = "discarded message" if discarded else "pending transaction"
    return Result([table], {"store": store.name}, notes=[f"{counted(len(rows), kind)} in {store.name}", *notes])


def show(
    store: Store,
    *,
    transaction_id: TransactionId,
    payload: Annotated[bool, typer.Option("--payload", help="Print keys, values and headers as well.")] = False,
) -> Result:
    """Print one transaction: its messages, its state, and the actions of operators."""
    _check_ids([transaction_id])
    if payload:
        store.require_kafka("--payload")
    acts, notes = list[dict[str, Any]](), list[str]()
    with store.open() as opened:
        states = _pending_state(opened, transaction_id, payload)
        try:
            gone = [each for each in opened.discarded() if each.transaction_id == transaction_id]
            states += [{**_discarded_row(each), "messages": _discarded_messages(each, payload)} for each in gone]
            acts = [_act(act) for act in opened.acts(transaction_id)]
        except BrokerConnectionError as error:
            if store.file is None:
                raise
            # A file store is readable without Kafka.
            notes = [f"the actions of operators are not shown: {error}"]
    if not states and not acts:
        text = "is neither pending nor discarded: it is settled, or never was in"
        raise PenstockError(f"transaction {transaction_id} {text} {store.name}")
    states = states or [{"transaction_id": transaction_id, "state": "settled"}]
    tables = [Table(state["state"], [state], blocks=True) for state in states]
    return Result([*tables, Table("acts", acts)], notes=notes)


def commit(store: Store, *, transaction_ids: TransactionIds, reason: Reason = "", timeout: Timeout = 30.0) -> Result:
    """Publish pending transactions that are undecided.

    Each decision is in the audit log. Ends with 1 if a decision does not stand.
    """
    return _decided(store, transaction_ids, "COMMIT", reason, timeout)


def rollback(store: Store, *, transaction_ids: TransactionIds, reason: Reason = "", timeout: Timeout = 30.0) -> Result:
    """Roll back transactions that are undecided, or committed but not yet due.

    Each decision is in the audit log. Ends with 1 if a decision does not stand.
    """
    return _decided(store, transaction_ids, "ROLLBACK", reason, timeout)


def discard(store: Store, *, transaction_ids: TransactionIds, reason: Reason = "", timeout: Timeout = 30.0) -> Result:
    """Move transactions that are undecided, or refused by their target topic, to the discarded topic.

    Each decision is in the audit log. Ends with 1 if a decision does not stand.
    """
    return _decided(store, transaction_ids, "DISCARD", reason, timeout)


def resume(
    store: Store,
    *,
    transaction_id: TransactionId,
    reason: Reason = "",
    again: Annotated[
        bool, typer.Option("--again", help="Also if it was brought back before; it may become visible twice.")
    ] = False,
) -> Result:
    """Bring a discarded transaction back, undecided. Its producer group is checked again, with a new count."""
    _check_ids([transaction_id])
    log_to_stderr()
    if again:
        store.require_kafka("--again")
    with store.open() as opened:
        count = opened.resume(transaction_id, _actor(), reason, again=again)
    outcome = f"{counted(count, 'message')} brought back"
    line = f"{transaction_id}: {outcome}; its group is asked again"
    return Result(facts={"transaction_id": transaction_id, "outcome": outcome}, lines=[line])


def create_tables(
    *,
    sql: Annotated[
        str, typer.Option("--sql", help="The database: sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME.")
    ],
    shards: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of shards in new tables; each has one coordinator at a time.")
    ] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the statements, and create nothing.")] = False,
) -> Result:
    """Create the absent tables of a store in a database, if its users lack the permission to create them.

    With --dry-run, it prints the statements for an administrator of the database.
    """
    with database(sql) as opened:
        from penstock.transactions.stores.sql import schema

        if dry_run:
            statements = schema.statements(opened, shards)
            lines = [line.expandtabs(4) for text in statements for line in f"{text};".splitlines()]
            return Result(facts={"statements": statements}, lines=lines)
        _, count = schema.create(opened, shards)
    return Result(facts={"shards": count}, lines=[f"the tables of the store exist, with {counted(count, 'shard')}"])


def _decided(store: Store, ids: Sequence[str], verdict: str, reason: str, timeout_s: float) -> Result:
    """Store an operator's decisions one by one; the result is a failure if one of them does not stand."""
    from penstock.transactions.operator.administration import outcome_text
    from penstock.transactions.wire.ops import Verdict

    _check_ids(ids)
    outcomes: list[dict[str, Any]] = []
    failure: PenstockError | None = None
    with store.open() as opened:
        log_to_stderr()
        for transaction_id in ids:
            stands = True
            try:
                waits = opened.decide(transaction_id, Verdict[verdict], _actor(), reason, timeout_s)
                text = outcome_text(Verdict[verdict], waits)
            except TransactionError as error:
                stands, text = False, str(error)
            except PenstockError as error:  # earlier decisions are printed first
                failure = error
                break
            outcomes.append({"transaction_id": transaction_id, "stands": stands, "outcome": text})
    if failure is None and (lost := [outcome for outcome in outcomes if not outcome["stands"]]):
        failure = PenstockError(f"{len(lost)} of {len(outcomes)} decisions do not stand; the lines above say why")
    lines = [f"{outcome['transaction_id']}: {outcome['outcome']}" for outcome in outcomes]
    return Result(facts={"decisions": outcomes}, lines=lines, failure=failure)


def _pending_row(pending: PendingTransaction) -> dict[str, Any]:
    waits = pending.waits_for or "a decision"
    if pending.held_by is not None:
        waits = f"{pending.held_by}, before it in its key"
    elif pending.waits_for == "its time" and pending.deliver_at_ms is not None:
        waits = time_text(pending.deliver_at_ms)
    decided = None if pending.decided is None else pending.decided.name
    row = {**asdict(pending), "topics": _distinct(pending.topics), "decided": decided, "waits_for": waits}
    return {"transaction_id": row.pop("transaction_id"), "state": "pending", **row}


def _pending_state(opened: Administration, transaction_id: str, payload: bool) -> list[dict[str, Any]]:
    """Return the row of a pending transaction for `show`, or nothing; a store in Kafka has its messages too."""
    from penstock.transactions.stores.kafka.administration import KafkaAdministration

    if isinstance(opened, KafkaAdministration):
        if (found := opened.find(transaction_id)) is None:
            return []
        pending, row = found.pending, _pending_row(found.shown)
        halves = zip(pending.halves, pending.offsets, strict=True)
        messages = [_message(half, f"half {found.half_partition}:{offset}", payload) for half, offset in halves]
        if pending.verdict is not None:
            author = "" if pending.author is None else f" by {_AUTHORS[pending.author.name]}"
            row["decided"] = f"{pending.verdict.name}{author}"
        return [{**row, "messages": messages}]
    shown = opened.show(transaction_id)
    return [] if shown is None else [{**_pending_row(shown), "messages": [f"to {topic}" for topic in shown.topics]}]


def _discarded_row(gone: Discarded) -> dict[str, Any]:
    by = gone.resumed_by
    return {
        "transaction_id": gone.transaction_id,
        "state": "discarded",
        "group": gone.group,
        "topics": _distinct(gone.topics),
        "reason": f"{gone.reason}; brought back by {by}" if by else gone.reason,
        "check_count": gone.check_count,
        "at_ms": gone.at_ms,
        "resumed_by": by or None,
    }


def _discarded_messages(gone: Discarded, payload: bool) -> list[str]:
    from penstock.transactions.operator.audit import DiscardedMessage

    if not isinstance(gone, DiscardedMessage):
        return _distinct(gone.topics)
    return [_message(gone.half, f"discarded {gone.partition}:{gone.offset}", payload)]


def _distinct(topics: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(topics))


def _message(half: Half, place: str, payload: bool) -> str:
    part = "" if half.part is None else f", part {half.part[0]} of {half.part[1]}"
    where = half.topic if half.partition is None else f"{half.topic}:{half.partition}"
    text = f"to {where}{part}, at {place}, {len(half.value or b'')} bytes"
    if not payload:
        return text
    headers = "".join(f", header {name} {content_text(value)}" for name, value in half.headers)
    return f"{text}, key {content_text(half.key)}, value {content_text(half.value)}{headers}"


def _act(act: Act) -> dict[str, Any]:
    return {"at_ms": act.at_ms, "what": act.what, "by": act.who, "why": act.why or None}


def _actor() -> str:
    """Return the user and the machine of this command."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:200]


def _check_ids(ids: Sequence[str]) -> None:
    from penstock.transactions.wire.ids import is_id

    for transaction_id in ids:
        if not is_id(transaction_id):
            raise ConfigurationError(
                f"{transaction_id!r} is no transaction id; `penstock tx ls` lists the ids of pending transactions"
            )
