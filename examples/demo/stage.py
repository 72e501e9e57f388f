"""Everything that runs during the demo, and waiting for it with an eye on what fails or stands still."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tenacity import wait_fixed

from demo.children import DemoError, Part
from demo.display import Counts, Display
from demo.fold import FlightFold
from demo.schedule import SENDERS, Plan
from penstock import App, Coordinator, ReportSettings, retry
from penstock.devbroker import spark_environment
from penstock.running import RunningApp

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

#: Seconds between two reports of a part to the page.
_REPORT_S = 1.0

#: Seconds without any progress after which the demo gives up: Spark takes a minute to start on a busy machine.
STALLED_S = 120.0

_LOOK_S = 0.1


@dataclass
class Stage:
    """The running parts: coordinator, app, senders and Spark. For the main thread."""

    bootstrap_servers: str
    folder: Path
    #: The handler of the app.
    fold: FlightFold
    shown: Display
    #: Seconds that the parts have from the start of the senders on.
    limit_s: float
    wants_spark: bool
    #: Whether parts report to the page.
    reports: bool

    def __post_init__(self) -> None:
        """Make what does not run yet."""
        self._deadline = math.inf
        self.coordinator = Coordinator(
            bootstrap_servers=self.bootstrap_servers,
            transaction_timeout=_TRANSACTION_TIMEOUT_S,
            check_interval=_CHECK_INTERVAL_S,
            check_max=_CHECK_MAX,
        )
        self.senders: list[Part] = []
        self.spark: Part | None = None
        self.app: RunningApp | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            if self.wants_spark:
                arguments = [self.bootstrap_servers, TOPIC, str(self.folder), str(_REPORT_S) if self.reports else ""]
                spark = self._child("Spark", "spark.log", "totals", *arguments, environment=spark_environment())
                self.spark = opening.enter_context(spark)
            opening.enter_context(self.coordinator)
            self.app = opening.enter_context(self._app().start())
            self._open = opening.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.__exit__(*raised)  # type: ignore[arg-type]  # the three values of the with statement

    def start_senders(self, plan: Plan) -> None:
        """Start the sending processes. Spark's slow start is over by then: it fails when it is starved of time."""
        self.until(lambda _: self.spark is None or bool(self.spark.report("rows")), "Spark's query runs")
        self._deadline = time.monotonic() + self.limit_s
        self.senders = [self._sender(0, plan.killed), *(self._sender(number) for number in range(1, SENDERS))]

    def restart_sender(self, number: int) -> int | None:
        """Kill a sending process, start it again, and return the code its end gave."""
        code = self.senders[number].end(signal.SIGKILL)
        self.senders[number] = self._sender(number)
        return code

    def sent_all(self) -> bool:
        """Tell whether every sender has sent all its flights."""
        return all(sender.report("progress").get("finished", False) for sender in self.senders)

    def spark_rate(self) -> float | None:
        """Return the rows Spark stored for each second its batches took, or None where it stored none."""
        rows = {} if self.spark is None else self.spark.report("rows")
        return rows["count"] / rows["busy_s"] if rows.get("busy_s") else None

    def counts(self) -> Counts:
        """Return how far everything is."""
        reports = [sender.report("progress") for sender in self.senders]
        transactions = self.coordinator.statistics()
        app = self.app.statistics() if self.app else None
        return Counts(
            sent=sum(report.get("sent", 0) for report in reports),
            published=transactions.committed,
            handled=self.fold.finished + (app.dead_letters if app else 0),
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
            self.shown(counts)
            if condition(counts):
                return
            self._require_alive()
            now = time.monotonic()
            if self._progress(counts) != newest:
                moved, newest = now, self._progress(counts)
            if now > moved + STALLED_S:
                why = f"nothing has moved for {STALLED_S:g} s while waiting until"
            elif now > self._deadline:
                why = f"{self.limit_s:.0f} s were not enough; still waiting until"
            else:
                time.sleep(_LOOK_S)
                continue
            raise DemoError(f"{why} {what}.\n{self._situation()}")

    def _progress(self, counts: Counts) -> tuple[object, ...]:
        """Return what changes as long as something moves. Spark takes its time to start, step by step."""
        spark = {} if self.spark is None else {**self.spark.report("session"), **self.spark.report("rows")}
        return counts, spark.get("kind")

    def _require_alive(self) -> None:
        for child in (*self.senders, *([self.spark] if self.spark else [])):
            child.require_running()
        if self.app is not None and self.app.wait(0):
            raise DemoError("the app ended before its work was done; run the demo again with --keep and see demo.log")

    def _situation(self) -> str:
        senders = "; ".join(f"{sender.name}: {sender.report('progress')}" for sender in self.senders)
        app = self.app.statistics() if self.app else None
        spark = self.spark.report("rows") or "has stored nothing" if self.spark else "takes no part"
        return f"Coordinator: {self.coordinator.statistics()}\nApp: {app}\nSenders: {senders}\nSpark: {spark}"

    def _sender(self, number: int, stand_at: int | None = None) -> Part:
        arguments = [self.bootstrap_servers, TOPIC, str(self.folder), str(number)]
        arguments += [] if stand_at is None else [str(stand_at)]
        name, log = f"the airline's sender {number}", f"airline-{number}.log"
        return self._open.enter_context(self._child(name, log, "airline", *arguments))

    def _child(self, name: str, log: str, *arguments: str, environment: dict[str, str] | None = None) -> Part:
        return Part(name, [str(Path(__file__).parent), *arguments], self.folder / log, environment)

    def _app(self) -> App:
        report = ReportSettings(interval=_REPORT_S) if self.reports else False
        app = App("fleet", bootstrap_servers=self.bootstrap_servers, workers=WORKERS, report=report)
        policy = retry(attempts=ATTEMPTS, wait=wait_fixed(_RETRY_WAIT_S))
        app.handler(TOPIC, order="key", retry=policy, on_failure="dead_letter")(self.fold.handle)
        return app
