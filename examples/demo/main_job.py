"""`run`: the demo from the flights to the verdict."""

from __future__ import annotations

import logging
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from demo.aircraft import Fleet
from demo.airline import TOPIC, connect, create_database
from demo.flights import Flight, write_schedule
from demo.plan import Plan, plan
from demo.stage import Stage, StalledError
from demo.totals import query_runs, read_totals
from demo.verdict import Evidence, Row, judge, kept, rate, read_topic, table
from penstock import PenstockError
from penstock.devbroker import DevBroker

_PARTITIONS = 4

_INTERRUPTED = 130

#: Width of a line without a terminal: the verdict fits.
_FILE_WIDTH = 120


def run(flights: Sequence[Flight], console: Console, *, seed: int, spark: bool, page: bool, keep: bool) -> int:
    """Run the demo and return its exit code: 0 if every promise was kept, 1 if not, 130 if interrupted.

    Starts an embedded broker and processes, and always ends them. Call it from the main thread.

    Args:
        flights: all flights, in schedule order; `ConfigurationError` if there are too few.
        console: shows the progress and the verdict.
        seed: chooses the poison flight.
        spark: whether to run Spark.
        page: whether to serve the dashboard meanwhile.
        keep: whether to keep the databases, the broker's data and the logs in a folder here, and print its name.
    """
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    chosen = plan(flights, seed)
    title = f"{len(flights):,} flights in the CSV, {sum(flight.departed for flight in flights):,} departed"
    console.print(f"{title}. Starting an embedded Kafka{' and Spark' if spark else ''} ...", soft_wrap=True)
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # shuts down as Ctrl-C does
    try:
        with _folder(console, keep=keep) as folder:
            # Errors of the poison flight are expected: they go to a file and not to the screen.
            logging.basicConfig(filename=folder / "demo.log", format="%(asctime)s %(threadName)s %(name)s: %(message)s")
            rows = _run_all(flights, chosen, folder, console, spark=spark, page=page)
    except PenstockError as error:
        console.print(Text(f"The demo failed: {error}", style="red"), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted: every process of the demo has ended.")
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    aircraft = len({flight.tail for flight in flights if flight.departed and flight.tail})
    console.print(table(f"{title}, {aircraft:,} aircraft", rows))
    if kept(rows):
        console.print(Text("Every promise was kept.", style="green"))
        return 0
    console.print(Text("A promise was BROKEN: see the red rows.", style="bold red"))
    return 1


def _run_all(
    flights: Sequence[Flight], chosen: Plan, folder: Path, console: Console, *, spark: bool, page: bool
) -> list[Row]:
    """Start everything, kill the first sender, wait until everything is settled, and return the verdict."""
    write_schedule(folder, flights)
    create_database(folder)
    fleet = Fleet(chosen.poison)
    departed = sum(flight.departed for flight in flights)
    totals = {"sent": len(flights), "published": departed, "handled": departed}
    totals |= {"in Spark's table": departed} if spark else {}
    rates: list[Row] = []
    with DevBroker(data_dir=folder / "kafka") as broker:
        servers = broker.bootstrap_servers
        broker.create_topic(TOPIC, _PARTITIONS)
        with Stage(servers, folder, fleet, console, totals) as stage:
            if page:
                address = _free_address()
                stage.start("page", "penstock", "dashboard", "--bootstrap-servers", servers, "--http", address)
                console.print(f"The page: http://{address}", soft_wrap=True)
            if spark:
                stage.start("spark", "demo.totals", servers)
                # Before the senders: Spark fails to start if it gets too little processor time.
                stage.until(lambda _: query_runs(folder), "Spark's query runs")
            started_at = time.monotonic()
            other = stage.start("sender-1", "demo.airline", servers, "1")
            dying = stage.start("sender-0", "demo.airline", servers, "0", str(chosen.killed), ends_with=-signal.SIGKILL)
            try:
                stage.until(lambda _: dying.exit_code() is not None, "a sender died between local commit and decision")
                replacement = stage.start("sender-0", "demo.airline", servers, "0")
                stage.until(lambda _: replacement.exit_code() == other.exit_code() == 0, "every flight is sent")
                rates.append(rate("transactions sent", len(flights), time.monotonic() - started_at))
                stage.until(lambda counts: not counts["pending"], "every transaction is settled")
                published = len(read_topic(servers, TOPIC))
                stage.until(lambda counts: counts["handled"] >= published, "the app has handled every message")
                rates.append(rate("messages handled", published, time.monotonic() - started_at))
                if spark:
                    stored = "Spark has stored every message"
                    stage.until(lambda counts: counts["in Spark's table"] >= published, stored)
                    rates.append(rate("rows through Spark", published, time.monotonic() - started_at))
            except StalledError as error:  # the verdict shows what is missing
                console.print(Text(str(error), style="red"), soft_wrap=True)
            pending = stage.counts()["pending"]
        # Everything has ended now, so nothing changes.
        with closing(connect(folder)) as connection:
            recorded = [sequence for (sequence,) in connection.execute("SELECT sequence FROM flights")]
        evidence = Evidence(
            recorded=recorded,
            published=read_topic(servers, TOPIC),
            dead_letters=read_topic(servers, f"dlq.{TOPIC}"),
            fleet=fleet,
            totals=read_totals(folder) if spark else None,
            pending=pending,
            killed=dying.exit_code() == -signal.SIGKILL,
        )
    return [*judge(flights, chosen, evidence), *rates]


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def _folder(console: Console, *, keep: bool) -> Iterator[Path]:
    """Yield the folder of this run: a lasting one in the current folder, or a temporary one."""
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
