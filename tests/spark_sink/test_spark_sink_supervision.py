"""Restarts of queries, with a clock that the test moves and queries that are none: Spark is not started."""

from __future__ import annotations

import logging
import re
import traceback

import pytest
from pyspark.errors import AnalysisException
from supervised_world import FRAME, IDLE, World, report

from penstock.clients.rights import MissingRightError, Operation, topic_right
from penstock.errors import BrokerConnectionError, ConfigurationError, SinkError, TopicNotFoundError
from penstock.spark_sink.errors import DataLossError, SchemaMismatchError, SessionStoppedError, errors_in
from penstock.spark_sink.progress import SinkState
from penstock.spark_sink.queries.supervise import LONGEST_WAIT_S, RIGHT_WAIT_S, summary_of

#: What Spark keeps of an exception of the source, shortened; 4.3.0.
TOPIC_GONE = """[PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform planPartitions: Traceback (most recent call last):
  File "selection.py", line 160, in _require
    raise TopicNotFoundError(
penstock.errors.TopicNotFoundError: the option subscribe names topics that do not exist: t; create them first, or correct the name
 SQLSTATE: 38000
=== Streaming Query ===
Identifier: p4 [id = 42646fd8, runId = 0f29cb2a]
Current Available Offsets: {ValueError: none}
"""  # noqa: E501 - as it comes


#: The same of a right that is missing.
FORBIDDEN = re.sub(
    r"penstock\.errors\.TopicNotFoundError: .*",
    "penstock.clients.rights.MissingRightError: topic t cannot be read: User:a lacks the permission Read on topic t; "
    "an administrator gives it with: kafka-acls.sh --topic 't'",
    TOPIC_GONE,
)
MISSING = MissingRightError("topic t cannot be read", [topic_right(Operation.READ, "t")], "User:a")
FULL = ValueError("no room")


@pytest.mark.parametrize("failure", [MISSING, RuntimeError(FORBIDDEN)])
def test_a_query_whose_right_was_taken_away_is_tried_until_it_is_given_and_says_so_once(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(restarts=1)
    world.supervised.begin()
    world.commit(0)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        waits = []
        for _ in range(20):  # more than are allowed for other failures
            world.fail(failure)
            waits.append(world.wait_for_restart())

    assert waits == pytest.approx([RIGHT_WAIT_S] * 20)
    assert world.supervised.state is SinkState.RUNNING
    assert caplog.text.count("topic t cannot be read: User:a lacks the permission Read on topic t") == 1
    world.commit(1)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        world.fail(failure)
    assert "lacks the permission Read on topic t" in caplog.text, "it was taken away again"


def test_a_failed_query_or_start_is_tried_again_after_waits_that_double_up_to_a_minute() -> None:
    world = World()
    world.supervised.begin()

    waits = []
    for number in range(8):
        if world.supervised.state is SinkState.RUNNING:
            world.fail(FULL)
        world.refusals = [FULL] if number % 2 else []
        waits.append(world.wait_for_restart())
    world.wait_for_restart()

    assert waits == pytest.approx([1, 2, 4, 8, 16, 32, LONGEST_WAIT_S, LONGEST_WAIT_S])
    assert (world.supervised.state, world.restarts, len(world.started)) == (SinkState.RUNNING, 9, 6)
    assert world.supervised.last_error == "ValueError: no room"


def test_only_a_committed_batch_begins_the_count_again() -> None:
    world = World(restarts=2)
    world.supervised.begin()
    for batch_id in range(5):
        world.commit(batch_id)
        world.fail(FULL)

        assert world.wait_for_restart() == pytest.approx(1)

    for _ in range(2):
        # Spark was there, with nothing to do, before the batch; the batch itself it never reported.
        world.gates[-1](FRAME, 7)
        world.query.recentProgress = [report(7, run=f"run-{len(world.started)}", phases=IDLE)]
        world.fail(FULL)
        if world.supervised.state is SinkState.WAITING:
            world.wait_for_restart()

    assert world.supervised.state is SinkState.FAILED
    with pytest.raises(SinkError, match=r"the query orders ended: ValueError.*as often as restarts=2 allows"):
        raise world.supervised.failure or AssertionError


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (ConfigurationError("the option subscribe is wrong"), "another start would not fix it"),
        (AnalysisException("[UNRESOLVED_COLUMN] no such column"), "another start would not fix it"),
        (RuntimeError(TOPIC_GONE), "another start would not fix it"),
        (RuntimeError("Caused by: org.apache.spark.sql.catalyst.ExtendedAnalysisException: [X] x"), "would not fix it"),
        (RuntimeError("Traceback\npenstock.spark_sink.errors.DataLossError: offsets are gone"), "would not fix it"),
        (DataLossError("offsets 0 to 9 are gone"), "another start would not fix it"),
        (SessionStoppedError("Spark's session was stopped"), "another start would not fix it"),
        (TopicNotFoundError("no such topic"), "another start would not fix it"),
        (MISSING, "User:a lacks the permission Read on topic t.*another start would not fix it"),
        (RuntimeError(FORBIDDEN), "User:a lacks the permission Read on topic t.*another start would not fix it"),
    ],
)
def test_what_another_start_cannot_fix_is_not_started_again(failure: Exception, why: str) -> None:
    world = World()
    world.supervised.begin()
    world.fail(failure)

    assert (world.supervised.state, len(world.started)) == (SinkState.FAILED, 1)
    with pytest.raises(SinkError, match=f"the query orders ended: .*{why}") as raised:
        raise world.supervised.failure or AssertionError
    assert raised.value.__cause__ is failure


@pytest.mark.parametrize(
    "said", ["[CONCURRENT_STREAM_LOG_UPDATE] y", "Multiple streaming queries are concurrently using file:/x/metadata."]
)
def test_a_rival_on_the_same_checkpoint_is_outlasted_for_some_starts_and_named_without_sparks_stack(said: str) -> None:
    world = World(restarts=2)
    world.supervised.begin()
    for batch_id in range(3):
        world.commit(batch_id)  # a batch that both may have committed says nothing
        world.fail(RuntimeError(f"[STREAM_FAILED] x\n{said}\n\tat org.apache.spark.z"))
        if batch_id < 2:
            world.wait_for_restart()

    assert (world.supervised.state, world.restarts) == (SinkState.FAILED, 2)
    with pytest.raises(SinkError, match="another query writes to the same checkpoint: stop one") as raised:
        raise world.supervised.failure or AssertionError
    assert raised.value.__cause__ is None


def test_a_query_that_ends_without_a_failure_has_ended_and_its_last_reports_are_not_missed() -> None:
    world = World()
    world.supervised.begin()
    world.query.recentProgress = [report(2), report(3)]
    world.query.end()
    world.supervised.poll()

    assert (world.supervised.state, world.progress.statistics.batches) == (SinkState.ENDED, 2)


@pytest.mark.parametrize("error", [MISSING, SchemaMismatchError("no column"), BrokerConnectionError("no broker")])
def test_the_type_of_an_error_is_found_in_the_stack_that_spark_keeps_of_it(error: Exception) -> None:
    stack = "".join(traceback.format_exception(error))

    (found,) = errors_in(f"Job aborted:\n{stack}\n\tat org.apache.spark.api.python.BasePythonRunner.read\n")

    assert (type(found), str(found)) == (type(error), str(error))


def test_an_error_is_reported_in_one_line_out_of_sparks_wrapping() -> None:
    assert summary_of(RuntimeError(TOPIC_GONE)) == (
        "TopicNotFoundError: the option subscribe names topics that do not exist: t; create them first, "
        "or correct the name"
    )
    assert summary_of(ValueError("no room\nfor two")) == "ValueError: no room"
    assert summary_of(ValueError()) == "ValueError: no text"
