"""`run`: the main job from the first line of the CSV to the verdict."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from demo.book import FlightBook
from demo.display import display, page
from demo.flights import Columns, Flight, read_csv, read_package, write_schedule
from demo.fold import FlightFold, plain_states, plain_totals
from demo.schedule import Plan, left_unknown, plan
from demo.stage import ATTEMPTS, DEAD_LETTERS, PARTITIONS, TOPIC, Stage
from demo.topics import read_to_end
from demo.totals import read_totals
from demo.verdict import Row, differing, equal, kept, rate, table
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, PenstockError
from penstock.supervisor.stopping import until_signal

#: Seconds the default input may take in all, and the number of flights it has: larger inputs get more.
_LIMIT_S = 165.0
_LIMIT_FLIGHTS = 27_004

_INTERRUPTED = 130

#: Columns of a line where there is no terminal to say: the verdict fits.
_FILE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the demo."""

    whole_year: bool = False
    #: A CSV file of the user, instead of the flights.
    input: Path | None = None
    columns: Columns = field(default_factory=Columns)
    #: Whether the SQLite files, the broker's data and the logs stay in a folder here, which is named.
    keep: bool = False
    #: Chooses the poison flight.
    seed: int = 2013
    #: Whether the Spark query takes part.
    spark: bool = True
    #: Whether the page is served meanwhile.
    page: bool = True
    #: Flights that the app's handler takes without folding them; for a test that wants a red verdict.
    ignored: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Refuse options that contradict each other, with `ConfigurationError`."""
        if self.whole_year and self.input is not None:
            raise ConfigurationError("--all and --input exclude each other: --all is about the built-in flights")

    def flights(self) -> list[Flight]:
        """Read the flights these options name, in schedule order; `ConfigurationError` when that cannot be."""
        if self.input is not None:
            return read_csv(self.input, self.columns)
        return read_package(whole_year=self.whole_year)


def run(options: DemoOptions, console: Console | None = None) -> int:
    """Run the demo and return its exit code: 0 every promise kept, 1 not, 130 interrupted.

    Starts an embedded broker and child processes, and ends them whatever happens. Call it from the main thread. Input
    or options that make no sense are a `ConfigurationError`; then nothing was started.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    flights = options.flights()
    chosen = plan(flights, options.seed)
    rows: list[Row] = []
    try:
        with until_signal(), _folder(console, keep=options.keep) as folder, _log_file(folder / "demo.log"):
            rows = _perform(options, flights, chosen, folder, console)
    except ConfigurationError:
        raise
    except PenstockError as error:
        console.print(Text(f"The demo failed: {error}", style="red"), soft_wrap=True)
        return 1
    if not rows:
        console.print("Interrupted: every process of the demo has ended.")
        return _INTERRUPTED
    aircraft = len({flight.tail for flight in flights if flight.departed and flight.tail})
    console.print(table(f"{_departures(flights)}, {aircraft:,} aircraft", rows))
    if kept(rows):
        console.print(Text("Every promise was kept.", style="green"))
        return 0
    console.print(Text("A promise was BROKEN: see the red rows.", style="bold red"))
    return 1


def _perform(
    options: DemoOptions, flights: Sequence[Flight], chosen: Plan, folder: Path, console: Console
) -> list[Row]:
    """Start everything, wait until all is settled, and return the verdict."""
    departed = sum(flight.departed for flight in flights)
    parts = "an embedded Kafka and Spark" if options.spark else "an embedded Kafka"
    console.print(f"{_departures(flights)}. Starting {parts} ...", soft_wrap=True)
    fold = FlightFold(chosen.poison, options.ignored)
    limit_s = _LIMIT_S * max(1.0, len(flights) / _LIMIT_FLIGHTS)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(DevBroker(data_dir=folder / "kafka"))
        servers = broker.bootstrap_servers
        broker.create_topic(TOPIC, PARTITIONS)
        write_schedule(folder, flights)
        book = stack.enter_context(FlightBook(folder))
        stack.enter_context(page(console, servers, wanted=options.page))
        shown = stack.enter_context(display(console, flights=len(flights), departed=departed, spark=options.spark))
        stage = Stage(servers, folder, fold, shown, limit_s, wants_spark=options.spark, reports=options.page)
        stack.enter_context(stage)

        stage.start_senders(chosen)
        begun = time.monotonic()
        stage.until(lambda _: bool(stage.senders[0].report("standing")), "the first sender stands at its flight")
        transaction_id = str(stage.senders[0].report("standing")["transaction_id"])
        killed = stage.restart_sender(0) == -signal.SIGKILL

        stage.until(lambda _: stage.sent_all(), "the senders have sent every flight")
        sent_s = time.monotonic() - begun
        stage.until(
            lambda counts: not counts.pending and counts.published >= book.count(), "every transaction is settled"
        )
        published = read_to_end(servers, TOPIC)
        stage.until(lambda counts: counts.handled >= len(published), "the app has handled every message")
        handled_s = time.monotonic() - begun
        stage.until(
            lambda counts: counts.spark_rows is None or counts.spark_rows >= len(published),
            "Spark has stored every message",
        )
        if stage.app is not None:
            stage.app.stop()  # drains: its handler runs no more

        dead_letters = [flight.sequence for flight in read_to_end(servers, DEAD_LETTERS)]
        asked = sum(map(left_unknown, flights)) + 1  # the killed sender's
        answers = book.answers()
        states = differing(plain_states(flights, chosen.poison), fold.states())
        return [
            equal("rows in the flights table", departed, book.count()),
            equal("messages in the topic", departed, len(published)),
            equal("handled + dead letters", departed, fold.folded + len(dead_letters)),
            *(_spark_rows(flights, folder) if options.spark else ()),
            equal("aircraft in a wrong state", 0, states),
            equal("cancelled flights seen", 0, fold.cancelled_seen),
            equal("duplicates", 0, fold.duplicates),
            equal("order violations", 0, fold.order_violations),
            Row(
                "dead letters",
                f"flight {chosen.poison}",
                ", ".join(f"flight {sequence}" for sequence in dead_letters) or "none",
                dead_letters == [chosen.poison],
            ),
            equal("tries of the planted flight", ATTEMPTS, fold.poison_attempts),
            equal("undecided transactions", 0, stage.counts().pending),
            Row("transactions settled by checks", f"at least {asked:,}", f"{answers:,}", answers >= asked),
            equal("senders killed before their decision", 1, int(killed)),
            _killed_flight(chosen.killed, transaction_id, book, published),
            rate("transactions sent", len(flights) / sent_s),
            rate("messages handled", fold.finished / handled_s),
            *(rate("rows through Spark", rows) for rows in (stage.spark_rate(),) if rows is not None),
        ]


def _spark_rows(flights: Sequence[Flight], folder: Path) -> list[Row]:
    """Return the lines of Spark's table: the sum of its flights, and aircraft whose totals differ from the loop's."""
    wanted, found = plain_totals(flights), read_totals(folder)
    departed = sum(flight.departed for flight in flights)
    return [
        equal("messages in Spark's table", departed, sum(flights for flights, _ in found.values())),
        equal("aircraft with wrong totals in Spark", 0, differing(wanted, found)),
    ]


def _killed_flight(sequence: int, transaction_id: str, book: FlightBook, published: Sequence[Flight]) -> Row:
    """Return the line of the flight whose sender was killed between its local commit and its decision."""
    recorded = book.transaction_of(sequence) == transaction_id
    checked = book.answered(transaction_id)
    times = sum(flight.sequence == sequence for flight in published)
    found = [
        "recorded" if recorded else "not recorded",
        "checked" if checked else "not checked",
        {0: "never published", 1: "published once"}.get(times, f"published {times}x"),
    ]
    right = recorded and checked and times == 1
    return Row(f"its flight {sequence}", "recorded, checked, published once", ", ".join(found), right)


def _departures(flights: Sequence[Flight]) -> str:
    return f"{len(flights):,} flights in the CSV, {sum(flight.departed for flight in flights):,} departed"


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
