"""What handlers on executors return, on real Spark and real Kafka: each result once (I9), in the order of its key."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from streams import lose_commit, run_sink

from kafka_tools import read_all
from penstock import Outgoing
from penstock.consumer import handler, retry
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.spark_sink import HandlerSink
from penstock.spark_sink.sinks.sink import ledger_entries


@pytest.mark.thorough
def test_a_replayed_batch_and_a_lost_checkpoint_call_handlers_again_and_publish_nothing_twice(  # noqa: PLR0917 - fixtures
    spark: SparkSession,
    broker: DevBroker,
    new_topic: Callable[..., str],
    write: Callable[..., None],
    ledger_topic: str,
    tmp_path: Path,
) -> None:
    """Handlers say another thing at every call: so it shows that of each message one call's results are visible."""
    source, invoices, audit, seen = new_topic(partitions=2), new_topic(partitions=3), new_topic(1), list[int]()
    calls = tmp_path / "calls"
    where = str(calls)

    def bill(message: Message) -> Iterator[object]:
        import uuid

        with open(where, "a") as file:  # noqa: PTH123 - executors cannot import this file
            file.write(".")
        call = uuid.uuid4().hex
        if message.value == b"9":
            raise ValueError("no such order")
        if message.value == b"1":
            yield Outgoing(audit, None, key=b"1", partition=0)
            return
        yield {"n": int(message.value or b""), "call": call}
        yield Outgoing(audit, call.encode(), key=message.value, headers={"of": "bill"})

    sink = HandlerSink(
        {source: handler(bill, to=invoices, encoder="json", on_failure="dead_letter", retry_policy=retry(1))},
        group="billing",
        parallelism=2,
        bootstrap_servers=broker.bootstrap_servers,
        name=invoices,
        ledger_topic=ledger_topic,
        headers=False,
    )

    def store(batch: DataFrame, batch_id: int) -> None:
        seen.append(batch_id)
        sink(batch, batch_id)

    def run(checkpoint: str) -> None:
        most = {"maxOffsetsPerTrigger": "20"}
        run_sink(spark, broker.bootstrap_servers, source, store, tmp_path / checkpoint, name=invoices, options=most)

    rows = [(b"key-%d" % (n % 4), b"%d" % n) for n in range(40)]
    for partition in (0, 1):
        write(source, partition, [row for row in rows if int(row[0][-1:]) % 2 == partition])
    run("checkpoint")
    lose_commit(tmp_path / "checkpoint", 1)
    run("checkpoint")
    run("another checkpoint")

    assert seen == [0, 1, 1, 0, 1]
    assert len(calls.read_text()) == 40 + 20 + 40  # handlers really were called again
    found = defaultdict(list)
    of_call = {}
    for one in read_all(broker.bootstrap_servers, invoices):
        body = json.loads(one.value())
        found[one.key()].append(body["n"])
        of_call[b"%d" % body["n"]] = body["call"].encode()
    assert found == {
        key: [int(value) for own, value in rows if own == key and value not in (b"1", b"9")] for key, _ in rows
    }
    audited = read_all(broker.bootstrap_servers, audit)
    assert len(audited) == 39
    # Of each message, both results are those of one call.
    assert {one.key(): one.value() for one in audited} == {b"1": None, **of_call}
    assert {tuple(one.headers() or ()) for one in audited} == {(), (("of", b"bill"),)}
    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{source}")
    assert (letter.value(), dict(letter.headers())["__dlq.errors.group"]) == (b"9", b"billing")
    report = sink.last_report
    assert report is not None
    assert (report.rows, report.handled, report.dead_letters, report.results) == (20, 20, 0, 40)
    # Where a query without a checkpoint begins.
    begun = ledger_entries(sink, "", [(source, 0), (source, 1)])
    assert {part: entry.end for part, entry in begun.items()} == {(source, 0): 20, (source, 1): 20}
