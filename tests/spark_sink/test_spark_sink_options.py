from __future__ import annotations

import re
import subprocess
import sys
import traceback
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigurationError, MessageFormatError
from penstock.spark_sink.queries.start import trigger_arguments
from penstock.spark_sink.source.brokers import OffsetReader
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import (
    SMALL_TASK,
    OffsetRange,
    Offsets,
    cut,
    from_json,
    limited,
    parse_offsets,
    to_json,
)
from penstock.spark_sink.source.positions import Position

#: What needs no package for SQL.
WITHOUT_SQL = ["KafkaSink", "DeltaSink", "HandlerSink", "register", "start_sink"]
LEAST = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "orders"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"subscribe": " , "}, "subscribe names no topic"),
        ({"subscribePattern": "orders"}, "no option subscribePattern any more: name the topics with subscribe"),
        ({"startingOffsets": "yesterday"}, "startingOffsets"),
        ({"startingOffsets": "{}"}, "startingOffsets"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        ({"minPartitions": "many"}, "minPartitions"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss"),
        ({"includeHeaders": "1"}, "includeHeaders"),
        ({"timestampOutOfRange": "0"}, "timestampOutOfRange must be null or error, but is '0'"),
        ({"kafka.auto.offset.reset": "latest"}, "kafka.auto.offset.reset"),
        ({"kafka.enable.auto.commit": "true"}, "kafka.enable.auto.commit"),
        ({"kafka.key.deserializer": "String"}, "kafka.key.deserializer"),
        ({"kafka.logger": "x"}, r"kafka\.logger cannot be set"),
        ({"kafka.default.topic.config": "x"}, r"kafka\.default\.topic\.config cannot be set: give its settings"),
        ({"kafka.bootstrap.servers": " "}, "kafka.bootstrap.servers"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp must be a number of milliseconds"),
        ({"endingTimestamp": "-1"}, "endingTimestamp must be a number of milliseconds"),
        ({"startingTimestamp": str(2**63)}, f"startingTimestamp must be a number .* at most {2**63 - 1}"),
        ({"endingTimestamp": "9" * 5_000}, "endingTimestamp must be a number of milliseconds"),
        ({"fetchOffset.numRetries": "-1"}, "fetchOffset.numRetries must be a whole number of at least 0"),
        ({"fetchOffset.retryIntervalMs": "1s"}, "fetchOffset.retryIntervalMs"),
        ({"kafkaConsumer.pollTimeoutMs": "0"}, "kafkaConsumer.pollTimeoutMs"),
        ({"groupIdPrefix": "team"}, "no option groupIdPrefix any more: give kafka.group.id"),
        # The client library ends the process that gives it an empty group.
        ({"kafka.group.id": ""}, r"kafka\.group\.id is empty"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        SourceOptions.parse(LEAST | options)


def test_names_of_options_have_any_case_and_a_topic_that_is_named_twice_is_read_once() -> None:
    options = SourceOptions.parse({"KAFKA.Bootstrap.Servers": "127.0.0.1:9092", "SUBSCRIBE": "orders, mine,orders"})

    assert options.topics == ("orders", "mine")
    assert (options.read_committed, options.client["group.id"]) == (True, "penstock-spark")


def test_an_end_has_no_meaning_in_a_stream() -> None:
    for ends in ({"endingOffsets": "latest"}, {"endingTimestamp": "0"}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(ends))} has no meaning"):
            SourceOptions.parse(LEAST | ends).for_stream()


def test_a_time_counts_before_offsets() -> None:
    offsets = '{"orders": {"0": 3}}'
    given = LEAST | {"startingOffsets": offsets, "endingOffsets": offsets}
    timed = SourceOptions.parse(given | {"startingTimestamp": "5", "endingTimestamp": "6"})

    assert timed.starting == Position("startingTimestamp", 5, is_time=True)
    assert timed.ending == Position("endingTimestamp", 6, is_time=True)
    assert SourceOptions.parse(given).starting == Position("startingOffsets", {("orders", 0): 3})


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("security.protocol", 'Invalid value "***" for configuration property "security.protocol"'),
        ("fetch.message.max.bytes", 'Invalid value for configuration property "fetch.message.max.bytes"'),
        ("ssl.key.pem", "ssl.key.pem failed"),
        ("isolation.level", 'Invalid value "***" for configuration property "isolation.level"'),
        ("stats_cb", "expected stats_cb property as a callable function"),
        ("sasl.jaas.config", "Java JAAS configuration is not supported"),
        ("ssl.truststore.location", "Java TrustStores are not supported, use `ssl.ca.location`"),
        ("fetch.canary", 'No such configuration property: "fetch.canary"'),
    ],
)
def test_what_the_client_refuses_is_named_without_its_value(setting: str, text: str) -> None:
    given = LEAST | {"kafka.security.protocol": "ssl", f"kafka.{setting}": "canary-4711"}

    with pytest.raises(ConfigurationError, match=re.escape(text)) as raised:
        OffsetReader(SourceOptions.parse(given))

    assert "canary-4711" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("trigger", ["", "5", "often", "0 seconds", "-1 seconds"])
def test_a_trigger_that_is_none_is_refused(trigger: str) -> None:
    with pytest.raises(ConfigurationError, match="trigger must be an interval"):
        trigger_arguments(trigger)


@pytest.mark.parametrize(
    ("packages", "names", "text"),
    [
        (["pyspark"], ["register"], "needs the package pyspark.*pip install 'penstock\\[spark\\]'"),
        pytest.param(
            ["pyspark.sql.streaming.datasource"],
            ["register"],
            "or of another version: .*datasource.*; install it",
            marks=pytest.mark.thorough,
        ),
        (["sqlalchemy", "psycopg"], WITHOUT_SQL, "^" + " ".join(WITHOUT_SQL) + "$"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_a_missing_package_is_answered_with_the_extra_to_install(
    packages: list[str], names: list[str], text: str
) -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({packages}))\n"
        "import penstock.spark_sink as spark_sink\n"
        f"try: print(*(getattr(spark_sink, name).__name__ for name in {names}))\n"
        "except spark_sink.ConfigurationError as error: print(error)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)

    assert re.search(text, done.stdout.strip())


partitions = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 5))
offsets = st.dictionaries(partitions, st.integers(0, 2**62), min_size=1)
ranges = st.lists(
    st.builds(
        lambda partition, start, size: OffsetRange("a", partition, start, start + size),
        st.integers(0, 9),
        st.integers(0, 10**9),
        st.integers(0, 10**6),
    ),
    unique_by=lambda part: part.partition,
)


@given(offsets)
def test_offsets_survive_the_way_through_json(given_offsets: Offsets) -> None:
    assert from_json(to_json(given_offsets)) == given_offsets


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"a": {"x": 1}}', '{"a": {"0": "1"}}', '{"a": {"0": true}}', '{"a": {"0": -3}}']
)
def test_offsets_of_another_shape_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(MessageFormatError, match="offset"):
        parse_offsets(text)


@given(offsets, st.data(), st.integers(1, 1000))
def test_a_limit_is_used_up_but_never_passed(start: Offsets, data: st.DataObject, limit: int) -> None:
    latest = {part: offset + data.draw(st.integers(0, 500)) for part, offset in start.items()}

    ends = limited(start, latest, limit)

    taken = {part: ends[part] - start[part] for part in ends}
    assert ends.keys() == latest.keys()
    assert all(0 <= taken[part] <= latest[part] - start[part] for part in taken)
    assert sum(taken.values()) == min(limit, sum(latest.values()) - sum(start.values()))


@given(st.integers(8, 1000), st.integers(1, 10**9))
def test_a_small_partition_does_not_starve_among_large_ones(limit: int, large: int) -> None:
    latest = {("a", 0): 1, **{("a", number): large for number in range(1, 8)}}

    ends = limited({}, latest, limit)

    assert ends["a", 0] == 1


def test_a_log_that_ends_before_the_start_is_not_read_backwards() -> None:
    ends = limited({("a", 0): 100, ("a", 1): 0}, {("a", 0): 7, ("a", 1): 50}, 10)

    assert ends == {("a", 0): 7, ("a", 1): 10}


@given(ranges, st.integers(1, 50))
def test_tasks_cover_every_offset_once(given_ranges: list[OffsetRange], least: int) -> None:
    tasks = [task for (task,) in cut(given_ranges, least)]

    whole = [part for part in given_ranges if part.size]
    assert all(task.size > 0 for task in tasks)
    for part in whole:
        mine = sorted(task for task in tasks if task.partition == part.partition)
        assert (mine[0].start, mine[-1].end) == (part.start, part.end)
        assert all(before.end == after.start for before, after in pairwise(mine))
    assert len(tasks) >= min(least, sum(part.size for part in whole))


@given(ranges)
def test_small_ranges_share_tasks_and_no_offset_is_left_out(given_ranges: list[OffsetRange]) -> None:
    tasks = cut(given_ranges)

    assert [part for task in tasks for part in task] == [part for part in given_ranges if part.size]
    assert all(len(task) == 1 or sum(part.size for part in task) <= SMALL_TASK for task in tasks)
    assert all(sum(part.size for part in [*before, after[0]]) > SMALL_TASK for before, after in pairwise(tasks))
