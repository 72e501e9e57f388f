"""What is shown of Spark's queries: reports as values, metrics, ledgers."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Mapping

import pytest
from progress_reports import Ledger, values

from penstock.errors import MessageFormatError
from penstock.spark_sink.monitoring.progress import QueryProgress, SinkPartition, SinkState, SinkStatistics
from penstock.spark_sink.monitoring.progress_publisher import ProgressPublisher
from penstock.spark_sink.source.offsets.planning import Offsets
from telemetry_tools import Recorded
from waiting import wait_until

PHASES = {"addBatch": 1433, "latestOffset": 169, "triggerExecution": 1877}


def report(  # each part of a report by its name
    batch_id: int,
    *,
    name: str | None = "store",
    run: str = "run-1",
    rows: int = 10,
    phases: Mapping[str, int] = PHASES,
    end: object = None,
    latest: object = None,
    **more: object,
) -> str:
    """Return a report as Spark 4.3 writes it."""
    source = {
        "description": "PythonMicroBatchStreamWithTriggerAvailableNow@4255c707",
        "startOffset": None,
        "endOffset": {"orders": {"0": 4, "1": 6}} if end is None else end,
        "latestOffset": {"orders": {"0": 8, "1": 12}} if latest is None else latest,
        "numInputRows": rows,
    }
    return json.dumps(
        {
            "id": "852c7024",
            "runId": run,
            "name": name,
            "batchId": batch_id,
            "numInputRows": rows,
            "processedRowsPerSecond": 5.3,
            "durationMs": phases,
            "sources": [source],
            **more,
        }
    )


IDLE = {"latestOffset": 3, "triggerExecution": 3}


def test_a_report_becomes_rows_seconds_offsets_and_lag() -> None:
    progress = QueryProgress.parse(report(7))

    assert (progress.name, progress.run_id, progress.batch_id, progress.executed) == ("store", "run-1", 7, True)
    assert (progress.rows, progress.rows_per_s) == (10, 5.3)
    assert progress.seconds["triggerExecution"] == 1.877
    assert progress.ends == {("orders", 0): 4, ("orders", 1): 6}
    assert progress.lag == {("orders", 0): 4, ("orders", 1): 6}


@pytest.mark.parametrize("end", ['{"orders": {"0": 4}}', {"orders": {"0": 4}}])
def test_offsets_come_as_texts_from_some_sources_and_as_objects_from_others(end: object) -> None:
    assert QueryProgress.parse(report(1, end=end)).ends == {("orders", 0): 4}


@pytest.mark.parametrize("end", [17, {"logOffset": 3}, "abc", [1], {"0": 5}])
def test_other_sources_are_passed_over(end: object) -> None:
    progress = QueryProgress.parse(report(1, end=end, latest=end))

    assert (progress.ends, progress.lag) == ({}, {})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"id": 1, "runId": 2}', "nonsense"])
def test_what_is_no_report_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(MessageFormatError, match="progress does not read"):
        QueryProgress.parse(text)


def test_what_is_no_report_costs_a_warning_and_the_next_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    publisher = ProgressPublisher()
    with caplog.at_level(logging.WARNING):
        publisher.take("nonsense")
        publisher.take("nonsense")
        publisher.take(report(0))

    assert publisher.shown("store").rows == 10
    assert len([one for one in caplog.records if "does not read" in one.message]) == 1


def test_each_batch_counts_once_in_whatever_order_its_reports_come() -> None:
    publisher = ProgressPublisher()
    for text in (report(0), report(0), report(3), report(1), report(2), report(3), report(4, rows=0, phases=IDLE)):
        publisher.take(text)

    shown = publisher.shown("store")
    assert (shown.batches, shown.rows, shown.batch_id) == (4, 40, 3)


def test_a_restarted_query_goes_on_counting_and_its_former_run_says_nothing_new_of_the_position() -> None:
    publisher = ProgressPublisher()
    publisher.take(report(5, end={"orders": {"0": 50}}))
    publisher.take(report(6, run="run-2", end={"orders": {"0": 60}}))
    publisher.take(report(7, end={"orders": {"0": 70}}))

    shown = publisher.shown("store")
    assert (shown.position, shown.batch_id, shown.rows) == ({("orders", 0): 60}, 6, 30)


def test_queries_of_others_are_left_out_where_names_are_given() -> None:
    publisher = ProgressPublisher(only=("store",))
    publisher.take(report(0, name="somebody's"))

    assert publisher.shown("somebody's").batches == 0


class Group:
    """Takes positions, and may fail or hang."""

    def __init__(self) -> None:
        self.taken: list[Offsets] = []
        self.go = threading.Event()
        self.go.set()
        self.fails = False
        self.closed = False

    def advance(self, position: Offsets) -> None:
        self.go.wait(60)
        self.taken.append(position)
        if self.fails:
            raise RuntimeError("no broker")

    def close(self) -> None:
        self.closed = True


def test_metrics_equal_the_reports_and_end_with_the_publisher(recorded: Recorded) -> None:
    publisher = ProgressPublisher(recorded.telemetry(), sinks={"store": Ledger()}, only=("store",))
    publisher.take(report(0))
    publisher.take(report(1, end={"orders": {"0": 5, "1": 12}}))
    publisher.restarted("store", 2)
    # A batch of its own each time: the first question fails, and what comes while it is asked may be one with the next.
    later = itertools.count(2)
    wait_until(lambda: recorded.points("penstock.spark.ledger.position") or publisher.take(report(next(later))))

    shown = {name: values(recorded, name) for name in recorded.metrics()}
    durations = {
        point.attributes["penstock.spark.phase"]: (point.count, point.sum)
        for point in recorded.points("penstock.spark.batch.duration")
    }
    publisher.close()

    assert shown["penstock.spark.rows"][()] >= 20
    assert shown["penstock.spark.rows_per_second"] == {(): 5.3}
    assert shown["penstock.spark.restarts"] == {(): 2}
    assert shown["penstock.spark.ledger.position"] == {("orders", "0"): 3}
    assert set(shown["penstock.spark.partition.lag"]) == {("orders", "0"), ("orders", "1")}
    count, seconds = durations["triggerExecution"]
    assert seconds == pytest.approx(1.877 * count)
    assert set(durations) == {"addBatch", "latestOffset", "triggerExecution"}
    assert recorded.points("penstock.spark.rows") == [], "what has ended is shown no more"


def test_a_sink_that_cannot_tell_its_ledger_costs_a_warning_without_its_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = Ledger()
    publisher = ProgressPublisher(sinks={"store": ledger})
    publisher.take(report(0))
    wait_until(lambda: ledger.asked == 1)
    publisher.take(report(1))

    wait_until(lambda: publisher.shown("store").ledger == {("orders", 0): 3})

    assert publisher.shown("store").partitions()[0] == SinkPartition("orders", 0, 4, 4, 3)
    assert "ConnectionError" in caplog.text
    assert "secret-of-the-url" not in caplog.text
    publisher.close()


def test_a_group_that_hangs_holds_no_report_up_and_gets_the_latest_position() -> None:
    group = Group()
    group.go.clear()
    publisher = ProgressPublisher(groups={"store": group})
    for batch in range(20):
        publisher.take(report(batch, end={"orders": {"0": batch}}))
    assert publisher.shown("store").batches == 20

    group.go.set()
    publisher.close()

    assert group.closed
    assert group.taken[-1] == {("orders", 0): 19}
    assert len(group.taken) <= 2, "what a later batch has overtaken is not written"


def test_a_group_that_fails_does_not_end_the_publishing(caplog: pytest.LogCaptureFixture) -> None:
    group = Group()
    group.fails = True
    publisher = ProgressPublisher(groups={"store": group})
    publisher.take(report(0))
    wait_until(lambda: len(group.taken) == 1)
    publisher.take(report(1))
    publisher.close()

    assert len(group.taken) == 2
    assert "was not written to its group" in caplog.text


def test_a_sink_says_where_it_stands_in_a_sentence() -> None:
    waiting = SinkStatistics(
        name="store",
        state=SinkState.WAITING,
        batch_id=7,
        rows_per_s=1234.4,
        batch_seconds=0.84,
        lag=12,
        restarts=1,
        retry_in=3.21,
        last_error="ValueError: no room",
    )

    assert str(waiting) == (
        "sink store: waiting, lag 12, batch 7 took 0.8 s at 1234 rows/s, restarted 1 time, next start in 3.2 s; "
        "ended by ValueError: no room"
    )
    assert str(SinkStatistics(name="store", state=SinkState.RUNNING)) == (
        "sink store: running, lag unknown, no batch committed yet"
    )
