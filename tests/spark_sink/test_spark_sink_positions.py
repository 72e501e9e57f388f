"""Where a query begins, ends and waits, on real Kafka, planned without Spark around it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMinRows
from source_tasks import Clock, options_for, ranges

from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, SourceError
from penstock.spark_sink.source.batch import BatchReader
from penstock.spark_sink.source.plan import OffsetRange
from penstock.spark_sink.source.stream import StreamReader

NewTopic = Callable[..., str]
Write = Callable[..., None]

#: The times of the messages, in milliseconds since the epoch.
FIRST_MS, STEP_MS = 1_700_000_000_000, 1_000


def planned(broker: DevBroker, **options: str) -> dict[int, tuple[int, int]]:
    """Return the range that a batch query reads of each partition."""
    found = ranges(BatchReader(options_for(broker, **options)).partitions())
    return {one.partition: (one.start, one.end) for one in found}


@pytest.fixture
def timed(broker: DevBroker, new_topic: NewTopic) -> str:
    """A topic with ten messages a second apart in partition 0, and five in partition 1."""
    # They are years old: with Kafka's week of retention they would be gone at its next look, every five minutes.
    topic = new_topic(partitions=2, config={"retention.ms": "-1"})
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for partition, count in ((0, 10), (1, 5)):
        for number in range(count):
            producer.produce(topic, b"x", partition=partition, timestamp=FIRST_MS + number * STEP_MS)
    assert producer.flush(30) == 0
    return topic


def at(seconds: float) -> str:
    return str(FIRST_MS + int(seconds * STEP_MS))


def test_a_batch_begins_and_ends_at_times(broker: DevBroker, timed: str) -> None:
    each = json.dumps({timed: {"0": int(at(2)), "1": int(at(0.5))}})
    later = json.dumps({timed: {"0": int(at(8)), "1": int(at(100))}})

    of_all = planned(broker, subscribe=timed, startingTimestamp=at(1.5), endingTimestamp=at(4))
    of_each = planned(broker, subscribe=timed, startingOffsetsByTimestamp=each, endingOffsetsByTimestamp=later)
    at_the_end = planned(broker, subscribe=timed, startingTimestamp=at(3), endingTimestamp=str(2**63 - 1))

    assert of_all == {0: (2, 4), 1: (2, 4)}
    assert of_each == {0: (2, 8), 1: (1, 5)}
    assert at_the_end == {0: (3, 10), 1: (3, 5)}


def test_a_time_after_the_last_message_is_an_error_or_the_end_as_the_strategy_says(
    broker: DevBroker, timed: str
) -> None:
    late = {"subscribe": timed, "startingTimestamp": at(7)}

    with pytest.raises(SourceError, match=rf"{timed}\[1\] has no message at or after {at(7)} ms.*Strategy to latest"):
        planned(broker, **late)
    to_the_end = StreamReader(options_for(broker, **late, startingOffsetsByTimestampStrategy="latest")).initialOffset()

    assert to_the_end == {timed: {"0": 7, "1": 5}}


def test_an_end_past_the_log_is_a_loss_or_the_end_of_the_log(broker: DevBroker, timed: str) -> None:
    past = {"subscribe": timed, "endingOffsets": json.dumps({timed: {"0": 99, "1": 3}})}

    with pytest.raises(SourceError, match="endingOffsets is 99, but its log ends at 10"):
        planned(broker, **past)

    assert planned(broker, **past, failOnDataLoss="false") == {0: (0, 10), 1: (0, 3)}


def test_a_start_past_the_log_is_a_loss_or_reads_nothing(
    broker: DevBroker, timed: str, caplog: pytest.LogCaptureFixture
) -> None:
    past = {"subscribe": timed, "startingOffsets": json.dumps({timed: {"0": 11, "1": 3}})}

    with pytest.raises(SourceError, match=rf"{timed}\[0\]: startingOffsets is 11, but its log ends at 10: .*check"):
        planned(broker, **past)

    assert planned(broker, **past, failOnDataLoss="false") == {1: (3, 5)}
    assert f"{timed}[0]: startingOffsets is 11, but its log ends at 10" in caplog.text
    # At its end there is nothing to read yet, and nothing lost.
    assert planned(broker, subscribe=timed, startingOffsets=json.dumps({timed: {"0": 10, "1": 3}})) == {1: (3, 5)}


def test_a_batch_waits_for_the_least_number_of_offsets_or_for_the_longest_delay(broker: DevBroker, timed: str) -> None:
    clock = Clock()
    options = options_for(broker, subscribe=timed, minOffsetsPerTrigger="10", maxTriggerDelay="30s")
    reader = StreamReader(options, clock)
    nothing, some, all_of_it = ({timed: {"0": one, "1": 5}} for one in (0, 5, 10))
    least = reader.getDefaultReadLimit()

    assert least == ReadMinRows(10)
    assert reader.latestOffset(some, least) == all_of_it  # the first of a run is never put off
    clock.now += 29
    assert reader.latestOffset(some, least) == some
    assert reader.latestOffset(nothing, least) == all_of_it
    clock.now += 29
    assert reader.latestOffset(some, least) == some
    clock.now += 2
    assert reader.latestOffset(some, least) == all_of_it


def test_a_checkpoint_of_another_topic_is_told_as_that(broker: DevBroker, new_topic: NewTopic, write: Write) -> None:
    topic, other = new_topic(), new_topic()
    write(topic, 0, [(None, b"x")] * 3)
    noted = {other: {"0": 2}}
    clear = rf"the checkpoint was written by a query over {other}, but this one has subscribe={topic}; give it a check"

    for regardless in ("true", "false"):
        reader = StreamReader(options_for(broker, subscribe=topic, failOnDataLoss=regardless))
        with pytest.raises(ConfigurationError, match=clear):
            reader.latestOffset(noted, ReadAllAvailable())
        with pytest.raises(ConfigurationError, match=clear):
            reader.partitions(noted, noted)
    for chosen in ({"subscribePattern": "no-such-.*"}, {"assign": json.dumps({topic: [0]})}):
        with pytest.raises(ConfigurationError, match=f"query over {other}, but this one has {next(iter(chosen))}="):
            StreamReader(options_for(broker, **chosen)).latestOffset(noted, ReadAllAvailable())


def test_a_topic_that_the_query_names_no_longer_is_not_called_deleted(
    broker: DevBroker, new_topic: NewTopic, write: Write
) -> None:
    topic, dropped = new_topic(), new_topic()
    write(topic, 0, [(None, b"x")] * 3)
    reader = StreamReader(options_for(broker, subscribe=topic))

    with pytest.raises(SourceError, match=rf"{dropped}\[0\] was read up to offset 2 and is read no more, as this"):
        reader.latestOffset({topic: {"0": 1}, dropped: {"0": 2}}, ReadAllAvailable())


def test_assigned_partitions_are_cut_into_the_tasks_that_are_wanted(broker: DevBroker, timed: str) -> None:
    cut = ranges(BatchReader(options_for(broker, assign=json.dumps({timed: [0]}), minPartitions="4")).partitions())

    assert len(cut) == 4
    assert [offset for one in cut for offset in range(one.start, one.end)] == list(range(10))


def test_a_partition_that_is_new_is_read_from_its_beginning(broker: DevBroker, timed: str) -> None:
    reader = StreamReader(options_for(broker, subscribe=timed))
    before = {timed: {"0": 10}}

    end = reader.latestOffset(before, ReadAllAvailable())

    assert end == {timed: {"0": 10, "1": 5}}
    assert ranges(reader.partitions(before, end)) == [OffsetRange(timed, 1, 0, 5)]
