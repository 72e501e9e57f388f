"""The demo's page: the dashboard, for as long as the demo runs, and who reports to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from penstock.demo.children import Child
from penstock.errors import ConfigurationError
from penstock.fleet.reports.reporter import Reporter
from penstock.fleet_member import ReportSettings, sender_of

#: Where it is, where that is free.
_PORT = 8400
REPORTS = ReportSettings(interval=1.0)


@contextmanager
def page(console: Console, bootstrap_servers: str, *, wanted: bool) -> Iterator[None]:
    """Serve the page where it is wanted and its packages are there, and say where, or what is missing."""
    if not wanted:
        yield
        return
    try:
        from penstock.fleet import Address, Dashboard

        try:
            made = Dashboard(bootstrap_servers, Address("127.0.0.1", _PORT))
        except ConfigurationError:  # somebody has the port, or a package is missing: then this says so
            made = Dashboard(bootstrap_servers, Address("127.0.0.1", 0))
    except ConfigurationError as error:
        console.print(f"Without a page: {error}", soft_wrap=True)
        yield
        return
    with made:
        console.print(f"The page: http://{made.address}", soft_wrap=True)
        yield


def spark_reporter(bootstrap_servers: str, spark: Child) -> Reporter:
    """Return what reports the Spark query, which runs in a process of its own, by what that tells."""

    def describe() -> Mapping[str, Any]:
        told = spark.report("rows")
        busy_s, batches = float(told.get("busy_s", 0.0)), int(told.get("batches", 0))
        query = {
            "name": "aircraft-totals",
            "state": "running" if spark.report("ready") else "starting",
            "rows": int(told.get("count", 0)),
            "batches": batches,
            "batch_id": batches - 1 if batches else None,
            "batch_seconds": told.get("last_s"),
            "rows_per_s": told.get("count", 0) / busy_s if busy_s else None,
        }
        return {"sinks": [query]}

    return Reporter(sender_of("aircraft-totals", {}), describe, bootstrap_servers, {}, REPORTS)
