from __future__ import annotations

import logging

from penstock import App, Message
from penstock.telemetry import TraceIds
from penstock.testing import TestApp
from telemetry_tools import Recorded


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_what_a_handler_logs_carries_the_ids_of_its_message_s_span(recorded: Recorded) -> None:
    log, kept = logging.getLogger("a.users.log"), Kept()
    kept.addFilter(TraceIds())
    log.addHandler(kept)
    app = App("orders", bootstrap_servers="in-memory:1", telemetry=recorded.telemetry())

    @app.handler("orders")
    def handle(message: Message) -> None:
        log.warning("in the handler")

    with TestApp(app) as running:
        running.send("orders", value=b"v")
        running.settle()
    log.warning("outside")
    log.removeHandler(kept)

    span = recorded.span("process orders").context
    within, outside = ((one.trace_id, one.span_id) for one in kept.records)  # type: ignore[attr-defined] # the filter sets them
    assert within == (f"{span.trace_id:032x}", f"{span.span_id:016x}")
    assert outside == ("", "")
