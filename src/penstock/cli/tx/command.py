"""`penstock tx`: what is pending in a store of transactions, what it waits for, and an operator's decision on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options.connection import ClientSettings, ConfigFile, client_settings
from penstock.cli.output import AsJson, log_to_stderr, print_json, print_table
from penstock.cli.tx.store_location import File, Prefix, Servers, Sql, StoreLocation
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError, TransactionError

if TYPE_CHECKING:
    from penstock.cli.tx.store_location import Operator
    from penstock.transactions.wire.ops import Verdict

#: Seconds that a list waits for a broker that is away: an operator soon hears of it.
_LIST_WAIT_S = 2.0
_ROW_LIMIT = 50

TransactionId = Annotated[str, typer.Argument(metavar="ID", help="Id of the transaction.")]
TransactionIds = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of transactions.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it stands in the audit log.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait until it took effect.")]


def tx() -> typer.Typer:
    """Return the commands for transactions. Each help text ends with an example."""
    app = typer.Typer(
        name="tx",
        help="Look at pending transactions, decide them, bring discarded ones back.",
        epilog="Example: penstock tx ls --bootstrap-servers 127.0.0.1:9092",
        no_args_is_help=True,
    )
    identity = "018f4e9c-5c1e-7abc-8def-0123456789ab"
    app.command(epilog="Example: penstock tx ls --older-than 3600")(ls)
    app.command(epilog=f"Example: penstock tx show {identity} --payload")(show)
    app.command("commit", epilog=f"Example: penstock tx commit {identity} --reason 'the order is in the books'")(
        _deciding("COMMIT", "Publish pending transactions, if nobody decided before.")
    )
    app.command("rollback", epilog=f"Example: penstock tx rollback {identity} --reason 'the order was cancelled'")(
        _deciding(
            "ROLLBACK", "Roll back transactions that nobody decided before, or that are committed and not due yet."
        )
    )
    app.command("discard", epilog=f"Example: penstock tx discard {identity}")(
        _deciding("DISCARD", "Move undecided transactions, and those their target refuses, to the discarded topic.")
    )
    app.command(epilog=f"Example: penstock tx resume {identity}")(resume)
    return app


def ls(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: Servers = None,
    sql: Sql = None,
    file: File = None,
    prefix: Prefix = "penstock",
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    group: Annotated[str | None, typer.Option(help="Only those of this producer group.")] = None,
    older_than: Annotated[float, typer.Option("--older-than", min=0, help="Only those of so many seconds.")] = 0.0,
    discarded: Annotated[bool, typer.Option("--discarded", help="Those that were discarded instead.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="With --discarded: also what was brought back since.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Rows to print, the oldest first.")] = _ROW_LIMIT,
    wait: Annotated[
        float, typer.Option(min=0.1, help="Seconds that brokers may keep it waiting: more for those that are slow.")
    ] = _LIST_WAIT_S,
    as_json: AsJson = False,
) -> None:
    """List what is not settled: age, checks, decision, and what it waits for. Needs no running coordinator.

    Exit codes: 0 done, 1 failed, 2 wrong use, 3 no broker.
    """
    from penstock.cli.output import printable
    from penstock.cli.tx.text import discarded_as_json, discarded_entry, discarded_rows, pending_as_json, pending_rows
    from penstock.transactions.stores.kafka.administration import KafkaAdministration

    location = StoreLocation(bootstrap_servers, prefix, sql, file, client_settings(config, config_file))
    if discarded and location.file is not None:
        raise ConfigurationError(
            "what a file store has discarded lies in Kafka, in the topic of its prefix: name that by --prefix instead "
            "of --file"
        )
    notices: list[str] = []
    with _within(wait), location.open(wait) as store:
        if discarded:
            now_ms = time.time() * 1000
            entries = [
                entry
                for entry in map(discarded_entry, store.discarded())
                if now_ms - entry.about.at_ms >= older_than * 1000 and group in {None, entry.about.group}
            ]
            shown = [entry for entry in entries if everything or not entry.resumed_by]
            rows, listed = discarded_rows(shown), [discarded_as_json(entry) for entry in shown]
            head: tuple[str, ...] = ("transaction", "group", "topic", "reason", "checks", "since")
            if len(shown) < len(entries):
                notices = [f"{len(entries) - len(shown)} more were brought back since; see them with --all"]
        else:
            found = [
                pending for pending in store.pending() if pending.age_s >= older_than and group in {None, pending.group}
            ]
            rows, listed = pending_rows(found), [pending_as_json(pending) for pending in found]
            head = ("transaction", "group", "topics", "age", "checks", "decided", "waits for")
            notices = store.coordinator_notices() if isinstance(store, KafkaAdministration) else []
    if as_json:
        print_json({"store": location.name, "transactions": listed, "notices": list(notices)})
        return
    print_table(head, rows[:limit])
    kind = "discarded message" if discarded else "pending transaction"
    typer.echo(f"{len(rows)} {kind}{'' if len(rows) == 1 else 's'} in {location.name}")
    if len(rows) > limit:
        typer.echo(f"{len(rows) - limit} of them are not shown; see them with --limit {len(rows)}")
    for line in notices:
        typer.echo(printable(line))


@contextmanager
def _within(wait: float) -> Iterator[None]:
    """Say in the error of brokers that kept a list waiting how they get more time."""
    try:
        yield
    except BrokerConnectionError as error:
        raise BrokerConnectionError(f"{error}; slow brokers get more than {wait:g} s by --wait") from error


def show(  # noqa: PLR0917 - as `ls`
    transaction_id: TransactionId,
    bootstrap_servers: Servers = None,
    sql: Sql = None,
    file: File = None,
    prefix: Prefix = "penstock",
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    payload: Annotated[bool, typer.Option("--payload", help="Print keys and values, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print one transaction: its messages, its state, and what operators did to it.

    Exit codes: 0 done, 1 failed or unknown, 2 wrong use, 3 no broker.
    """
    from penstock.cli.tx.text import act_line, discarded_entry, discarded_lines, pending_lines
    from penstock.transactions.stores.kafka.administration import KafkaAdministration

    _check_ids([transaction_id])
    location = StoreLocation(bootstrap_servers, prefix, sql, file, client_settings(config, config_file))
    if payload:
        location.require_kafka("--payload")
    with location.open() as store:
        if isinstance(store, KafkaAdministration):
            found = store.find(transaction_id)
            lines = [] if found is None else list(pending_lines(store.describe(found), found, payload=payload))
        else:
            described = store.show(transaction_id)
            lines = [] if described is None else list(pending_lines(described))
        for letter in map(discarded_entry, store.discarded()):
            if letter.about.transaction_id == transaction_id:
                lines.extend(discarded_lines(letter, payload=payload))
        acts = [act_line(act) for act in store.acts(transaction_id)]
    if not lines and acts:
        lines = [f"{transaction_id}  settled"]
    lines.extend(acts)
    if not lines:
        text = "is neither pending nor discarded: it is settled, or never was in"
        raise PenstockError(f"transaction {transaction_id} {text} {location.name}")
    if as_json:
        print_json({"transaction_id": transaction_id, "lines": lines})
    else:
        typer.echo("\n".join(lines))


def _deciding(verdict: str, what: str) -> Callable[..., None]:
    """Return a command that stores an operator's decisions one by one, and fails if one of them does not stand."""

    def decide(  # noqa: PLR0917 - as `ls`
        transaction_ids: TransactionIds,
        bootstrap_servers: Servers = None,
        sql: Sql = None,
        file: File = None,
        prefix: Prefix = "penstock",
        config: ClientSettings = None,
        config_file: ConfigFile = None,
        reason: Reason = "",
        timeout: Timeout = 30.0,
        as_json: AsJson = False,
    ) -> None:
        from penstock.transactions.wire.ops import Verdict

        location = StoreLocation(bootstrap_servers, prefix, sql, file, client_settings(config, config_file))
        _check_ids(transaction_ids)
        with location.open() as store:
            log_to_stderr()
            outcomes: list[dict[str, Any]] = []
            try:
                for transaction_id in transaction_ids:
                    outcomes.append(_decide_one(store, transaction_id, Verdict[verdict], reason, timeout))
                    if not as_json:
                        typer.echo(f"{transaction_id}: {outcomes[-1]['outcome']}")
            finally:
                # What was decided is reported, also where a later one failed.
                if as_json:
                    print_json(outcomes)
        stand = [outcome["stands"] for outcome in outcomes]
        if not all(stand):
            raise PenstockError(f"{stand.count(False)} of {len(stand)} decisions do not stand; the lines above say why")

    decide.__doc__ = f"""{what}

    Each act is in the audit log.

    Exit codes: 0 all stand, 1 failed or refused, 2 wrong use, 3 no broker.
    """
    return decide


def resume(  # noqa: PLR0917 - as `ls`
    transaction_id: TransactionId,
    bootstrap_servers: Servers = None,
    sql: Sql = None,
    file: File = None,
    prefix: Prefix = "penstock",
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    reason: Reason = "",
    again: Annotated[
        bool, typer.Option("--again", help="Also what was brought back before; it may become visible twice.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a discarded transaction back, undecided: its group is asked again, with a fresh count.

    Exit codes: 0 done, 1 failed or brought back before, 2 wrong use, 3 no broker.
    """
    from penstock.transactions.stores.kafka.administration import KafkaAdministration

    _check_ids([transaction_id])
    log_to_stderr()
    location = StoreLocation(bootstrap_servers, prefix, sql, file, client_settings(config, config_file))
    if again:
        location.require_kafka("--again")
    with location.open() as store:
        if isinstance(store, KafkaAdministration):
            count = store.resume(transaction_id, _actor(), reason, again=again)
            what = f"{count} message{'' if count == 1 else 's'} brought back"
        else:
            store.resume(transaction_id, _actor(), reason)
            what = "brought back"
    if as_json:
        print_json({"transaction_id": transaction_id, "outcome": what})
        return
    typer.echo(f"{transaction_id}: {what}; its group is asked again")


def _decide_one(
    store: Operator, transaction_id: str, verdict: Verdict, reason: str, timeout_s: float
) -> dict[str, Any]:
    """Decide one transaction; return what came of it, in words, and whether the decision stands."""
    from penstock.transactions.operator.administration import Effect

    try:
        decided = store.decide(transaction_id, verdict, _actor(), reason, timeout_s)
    except TransactionError as error:
        return {"transaction_id": transaction_id, "stands": False, "outcome": str(error)}
    stands = decided.effect is not Effect.REFUSED
    return {"transaction_id": transaction_id, "stands": stands, "outcome": decided.text(verdict)}


def _actor() -> str:
    """Return who runs this command: the user of the machine, and the machine."""
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
                f"{transaction_id!r} is no transaction id; `penstock tx ls` names those that are pending"
            )
