"""Everything that runs during the demo, and waiting for it with an eye on what fails or stands still."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import tenacity

from penstock.app import App
from penstock.consumer import retry
from penstock.demo.checks.fold import FlightFold
from penstock.demo.children import Child, DemoError
from penstock.demo.display import Counts, Display
from penstock.demo.page import REPORTS, spark_reporter
from penstock.demo.senders.airline import AirlineSettings
from penstock.demo.senders.plan import SENDERS, Plan
from penstock.devbroker import spark_environment
from penstock.fleet.reports.reporter import coordinator_reporter
from penstock.running import RunningApp
from penstock.transactions import Coordinator

TOPIC = "departures"
DEAD_LETTERS = f"dlq.{TOPIC}"
PARTITIONS = 4
WORKERS = 16

#: Tries of a message before it is a dead letter.
ATTEMPTS = 3
_RETRY_WAIT_S = 0.05

#: Checks come soon and often here, so that the demo ends soon: the defaults are 6 and 30 seconds.
_TRANSACTION_TIMEOUT_S = 1.0
_CHECK_INTERVAL_S = 2.0
_CHECK_MAX = 50

#: Seconds without any progress after which the demo gives up.
STALLED_S = 60.0

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where the demo's parts meet: the broker's address and the files of one run."""

    bootstrap_servers: str
    folder: Path

    @property
    def schedule(self) -> Path:
        """The flights, for the sending processes."""
        return self.folder / "schedule.jsonl"

    @property
    def database(self) -> Path:
        """The airline's SQLite file."""
        return self.folder / "airline.sqlite"


class Stage:
    """The running parts: coordinator, app, senders and Spark, for `limit_s` seconds at most. For the main thread."""

    def __init__(
        self,
        place: Workplace,
        plan: Plan,
        fold: FlightFold,
        shown: Display,
        *,
        limit_s: float,
        spark: bool,
        reports: bool = False,
    ) -> None:
        self._place = place
        self._fold = fold
        self._shown = shown
        self._deadline = time.monotonic() + limit_s
        self._limit_s = limit_s
        #: Whether the parts tell the page how they do.
        self._reports = reports
        self.coordinator = Coordinator(
            bootstrap_servers=place.bootstrap_servers,
            transaction_timeout=_TRANSACTION_TIMEOUT_S,
            check_interval=_CHECK_INTERVAL_S,
            check_max=_CHECK_MAX,
        )
        self.senders = [self._sender(number, plan.killed if number == 0 else None) for number in range(SENDERS)]
        self.spark = self._spark() if spark else None
        self._running: RunningApp | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            if self.spark is not None:
                opening.enter_context(self.spark)
            opening.enter_context(self.coordinator)
            self._running = opening.enter_context(self._app().start())
            servers = self._place.bootstrap_servers
            reporters = [coordinator_reporter("coordinator", self.coordinator, servers, {}, REPORTS)]
            reporters += [] if self.spark is None else [spark_reporter(servers, self.spark)]
            for reporter in reporters if self._reports else ():
                reporter.start()
                opening.callback(reporter.stop)
            self._open = opening.pop_all()
        return self

    def start_senders(self) -> None:
        """Start the sending processes. Spark's slow start is over by then: it fails when it is starved of time."""
        self.until(lambda _: self.spark is None or bool(self.spark.report("ready")), "Spark's query runs")
        for sender in self.senders:
            self._open.enter_context(sender)

    def __exit__(self, *raised: object) -> None:
        self._open.__exit__(*raised)  # type: ignore[arg-type]  # the three values of the with statement

    def restart_sender(self, number: int) -> int:
        """Kill a sending process, start it again, and return the code its end gave."""
        code = self.senders[number].kill()
        self.senders[number] = self._open.enter_context(self._sender(number, None))
        return code

    def stop_app(self) -> None:
        """Drain the app, so that its handler runs no more."""
        if self._running is not None:
            self._running.stop()

    def sent_all(self) -> bool:
        """Tell whether every sender has sent all its flights."""
        return all(sender.report("progress").get("finished", False) for sender in self.senders)

    def spark_rate(self) -> float | None:
        """Return the rows Spark stored for each second its batches took, or None where it stored none."""
        rows = {} if self.spark is None else self.spark.report("rows")
        busy_s = float(rows.get("busy_s", 0.0))
        return rows["count"] / busy_s if busy_s else None

    def counts(self) -> Counts:
        """Return how far everything is."""
        reports = [sender.report("progress") for sender in self.senders]
        transactions = self.coordinator.statistics()
        app = self._running.statistics() if self._running else None
        return Counts(
            sent=sum(report.get("sent", 0) for report in reports),
            published=transactions.committed,
            handled=self._fold.finished + (app.dead_letters if app else 0),
            spark_rows=None if self.spark is None else self.spark.report("rows").get("count", 0),
            pending=transactions.pending,
            held=sum(report.get("held", 0) for report in reports),
        )

    def until(self, condition: Callable[[Counts], bool], what: str) -> None:
        """Wait until the condition holds, showing the counts.

        `DemoError` where a child has ended, nothing moves any more or the time is over; or what stopped the app.
        """
        moved, newest = time.monotonic(), self._progress(Counts())
        while True:
            counts = self.counts()
            self._shown.show(counts)
            if condition(counts):
                return
            self._require_alive()
            now = time.monotonic()
            if self._progress(counts) != newest:
                moved, newest = now, self._progress(counts)
            if now > moved + STALLED_S:
                raise DemoError(
                    f"nothing has moved for {STALLED_S:g} s while waiting until {what}.\n{self._situation()}"
                )
            if now > self._deadline:
                raise DemoError(
                    f"{self._limit_s:.0f} s were not enough; still waiting until {what}.\n{self._situation()}"
                )
            time.sleep(_LOOK_S)

    def _progress(self, counts: Counts) -> tuple[object, ...]:
        """Return what changes as long as something moves. Spark takes its time to start, step by step."""
        spark = {} if self.spark is None else {**self.spark.report("session"), **self.spark.report("ready")}
        return counts, spark.get("kind")

    def _require_alive(self) -> None:
        for child in (*self.senders, *([self.spark] if self.spark else [])):
            child.require_running()
        if self._running is not None and self._running.wait(0):
            raise DemoError("the app ended before its work was done; run the demo again with --keep and see demo.log")

    def _situation(self) -> str:
        senders = "; ".join(f"{sender.name}: {sender.report('progress')}" for sender in self.senders)
        app = self._running.statistics() if self._running else None
        spark = self.spark.report("rows") or "has stored nothing" if self.spark else "takes no part"
        return f"Coordinator: {self.coordinator.statistics()}\nApp: {app}\nSenders: {senders}\nSpark: {spark}"

    def _sender(self, number: int, stand_at: int | None) -> Child:
        settings = AirlineSettings(
            bootstrap_servers=self._place.bootstrap_servers,
            topic=TOPIC,
            schedule=str(self._place.schedule),
            database=str(self._place.database),
            number=number,
            stand_at=stand_at,
        )
        log = self._place.folder / f"airline-{number}.log"
        return Child(f"the airline's sender {number}", ["penstock.demo", "airline", settings.to_json()], log)

    def _spark(self) -> Child:
        arguments = ["penstock.demo", "totals", self._place.bootstrap_servers, TOPIC, str(self._place.folder)]
        log = self._place.folder / "spark.log"
        return Child("Spark", arguments, log, spark_environment())

    def _app(self) -> App:
        report = self._reports and REPORTS
        app = App("fleet", bootstrap_servers=self._place.bootstrap_servers, workers=WORKERS, report=report)
        policy = retry(attempts=ATTEMPTS, wait=tenacity.wait_fixed(_RETRY_WAIT_S))
        app.handler(TOPIC, order="key", retry=policy, on_failure="dead_letter")(self._fold.handle)
        return app
