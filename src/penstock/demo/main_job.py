"""`run`: the main job from the first line of the CSV to the verdict."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.demo.checks.fold import FlightFold, plain_states, plain_totals
from penstock.demo.checks.totals import read_totals
from penstock.demo.checks.verdict import Facts, KilledSender, Rates, SparkFacts, differing, kept, table, verdict
from penstock.demo.display import display
from penstock.demo.flights import Flight, write_schedule
from penstock.demo.options import DemoOptions
from penstock.demo.page import page
from penstock.demo.senders.database import FlightBook
from penstock.demo.senders.plan import Plan, left_unknown, plan
from penstock.demo.stage import ATTEMPTS, DEAD_LETTERS, PARTITIONS, TOPIC, Stage, Workplace
from penstock.demo.topics import read_to_end
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, PenstockError

#: Seconds the default input may take in all, and the number of flights it has: larger inputs get more.
_LIMIT_S = 165.0
_LIMIT_FLIGHTS = 27_004

_INTERRUPTED = 130

#: Columns of a line where there is no terminal to say: the verdict fits.
_FILE_WIDTH = 120


def run(options: DemoOptions, console: Console | None = None) -> int:
    """Run the demo and return its exit code: 0 every promise kept, 1 not, 130 interrupted.

    Starts an embedded broker and child processes, and ends them whatever happens. Call it from one thread. Input or
    options that make no sense are a `ConfigurationError`; then nothing was started.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    flights = options.flights()
    chosen = plan(flights, options.seed)
    try:
        with _interruptible(), _folder(console, keep=options.keep) as folder, _log_file(folder / "demo.log"):
            facts = _perform(options, flights, chosen, folder, console)
    except KeyboardInterrupt:
        console.print("Interrupted: every process of the demo has ended.")
        return _INTERRUPTED
    except ConfigurationError:
        raise
    except PenstockError as error:
        console.print(Text(f"The demo failed: {error}", style="red"), soft_wrap=True)
        return 1
    rows = verdict(facts)
    console.print(table(facts, rows))
    if kept(rows):
        console.print(Text("Every promise was kept.", style="green"))
        return 0
    console.print(Text("A promise was BROKEN: see the red rows.", style="bold red"))
    return 1


def _perform(options: DemoOptions, flights: Sequence[Flight], chosen: Plan, folder: Path, console: Console) -> Facts:
    """Start everything, wait until all is settled, and collect the facts."""
    departed = sum(flight.departed for flight in flights)
    parts = "an embedded Kafka and Spark" if options.spark else "an embedded Kafka"
    console.print(f"{len(flights):,} flights, {departed:,} departed. Starting {parts} ...", soft_wrap=True)
    fold = FlightFold(chosen.poison, options.ignored)
    limit_s = _LIMIT_S * max(1.0, len(flights) / _LIMIT_FLIGHTS)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(DevBroker(data_dir=folder / "kafka"))
        place = Workplace(broker.bootstrap_servers, folder)
        admin = clients.admin(place.bootstrap_servers, {})
        ensure_topics(admin, place.bootstrap_servers, [TopicSpec(TOPIC, PARTITIONS)])
        write_schedule(place.schedule, flights)
        book = stack.enter_context(FlightBook(place.database))
        stack.enter_context(page(console, place.bootstrap_servers, wanted=options.page))
        shown = stack.enter_context(display(console, flights=len(flights), departed=departed, spark=options.spark))
        stage = Stage(place, chosen, fold, shown, limit_s=limit_s, spark=options.spark, reports=options.page)
        stack.enter_context(stage)

        stage.start_senders()
        begun = time.monotonic()
        stage.until(lambda _: bool(stage.senders[0].report("standing")), "the first sender stands at its flight")
        standing = stage.senders[0].report("standing")
        killed = stage.restart_sender(0) == -signal.SIGKILL

        stage.until(lambda _: stage.sent_all(), "the senders have sent every flight")
        sent_s = time.monotonic() - begun
        stage.until(
            lambda counts: not counts.pending and counts.published >= book.count(), "every transaction is settled"
        )
        published = read_to_end(place.bootstrap_servers, TOPIC)
        stage.until(lambda counts: counts.handled >= len(published), "the app has handled every message")
        handled_s = time.monotonic() - begun
        stage.until(
            lambda counts: counts.spark_rows is None or counts.spark_rows >= len(published),
            "Spark has stored every message",
        )
        stage.stop_app()

        transaction_id = str(standing["transaction_id"])
        counts = stage.counts()
        answers = book.answers()
        totals = read_totals(folder)
        states = plain_states(flights, chosen.poison)
        return Facts(
            flights=len(flights),
            departed=departed,
            recorded=book.count(),
            published=len(published),
            folded=fold.folded,
            dead_letters=[flight.sequence for flight in read_to_end(place.bootstrap_servers, DEAD_LETTERS)],
            poison=chosen.poison,
            poison_attempts=fold.poison_attempts,
            poison_attempts_wanted=ATTEMPTS,
            wrong_states=differing(states, fold.states()),
            aircraft=len(plain_totals(flights).keys() - {""}),
            cancelled_seen=fold.cancelled_seen,
            duplicates=fold.duplicates,
            order_violations=fold.order_violations,
            left_unknown=sum(map(left_unknown, flights)),
            settled_by_checks=answers.commit + answers.rollback,
            undecided=counts.pending,
            killed=KilledSender(
                sequence=chosen.killed,
                kills=int(killed),
                recorded=book.transaction_of(chosen.killed) == transaction_id,
                settled_by_check=book.answered(transaction_id),
                published=sum(flight.sequence == chosen.killed for flight in published),
            ),
            spark=SparkFacts(
                flights=sum(total.flights for total in totals.values()),
                wrong_totals=differing(plain_totals(flights), totals),
            )
            if options.spark
            else None,
            rates=Rates(
                transactions=len(flights) / sent_s, handled=fold.finished / handled_s, spark_rows=stage.spark_rate()
            ),
        )


@contextlib.contextmanager
def _folder(console: Console, *, keep: bool) -> Iterator[Path]:
    """Yield the folder of this run: one that stays, in the current folder, or a temporary one."""
    if keep:
        path = Path.cwd() / f"demo-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        path.mkdir()
        try:
            yield path
        finally:
            console.print(f"Kept: {path}", soft_wrap=True)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Send the log of the engines to a file: retries of a poison message are expected here, and not for the screen."""
    log = logging.getLogger("penstock")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
    propagated, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagated
        handler.close()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does. Only the main thread hears signals; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
