from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.spark_sink.options import SourceOptions
from penstock.spark_sink.query import trigger_arguments

LEAST = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "orders"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"subscribe": " , "}, "subscribe names no topic"),
        ({"assign": '{"orders": [0]}'}, "subscribe and assign"),
        ({"startingOffsets": "yesterday"}, "startingOffsets"),
        ({"startingOffsets": "{}"}, "startingOffsets"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        ({"minPartitions": "many"}, "minPartitions"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss"),
        ({"includeHeaders": "1"}, "includeHeaders"),
        ({"kafka.auto.offset.reset": "latest"}, "kafka.auto.offset.reset"),
        ({"kafka.enable.auto.commit": "true"}, "kafka.enable.auto.commit"),
        ({"kafka.key.deserializer": "String"}, "kafka.key.deserializer"),
        ({"kafka.isolation.level": "committed"}, "kafka.isolation.level"),
        ({"kafka.bootstrap.servers": " "}, "kafka.bootstrap.servers"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        SourceOptions.parse(LEAST | options)


@pytest.mark.parametrize("text", ["orders", "[]", '{"orders": 0}', '{"orders": [-1]}', '{"orders": [true]}'])
def test_an_assignment_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="assign must be JSON"):
        SourceOptions.parse({"kafka.bootstrap.servers": "127.0.0.1:9092", "assign": text})


def test_a_pattern_matches_whole_names_only() -> None:
    options = SourceOptions.parse({"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribePattern": "or.*s"})

    assert options.selection.pick({"orders": 2, "my-orders": 1, "orders-x": 1}) == [("orders", 0), ("orders", 1)]


def test_a_partition_that_does_not_exist_is_named() -> None:
    options = SourceOptions.parse({"kafka.bootstrap.servers": "127.0.0.1:9092", "assign": '{"orders": [0, 4]}'})

    with pytest.raises(TopicNotFoundError, match=r"orders\[4\].*2 partitions"):
        options.selection.pick({"orders": 2})


def test_option_names_are_case_insensitive_and_committed_is_the_default() -> None:
    options = SourceOptions.parse({"KAFKA.Bootstrap.Servers": "127.0.0.1:9092", "SUBSCRIBE": "a,b,a"})

    assert options.selection.pick({"a": 1, "b": 1}) == [("a", 0), ("b", 0)]
    assert options.read_committed
    assert options.fail_on_data_loss


def test_positions_that_would_read_nothing_are_refused_where_they_make_no_sense() -> None:
    with pytest.raises(ConfigurationError, match="endingOffsets has no meaning"):
        SourceOptions.parse(LEAST | {"endingOffsets": "latest"}).for_stream()
    for wrong in ("latest", '{"orders": {"0": -1}}'):
        with pytest.raises(ConfigurationError, match="startingOffsets must not be latest"):
            SourceOptions.parse(LEAST | {"startingOffsets": wrong}).for_batch()
    for wrong in ("earliest", '{"orders": {"0": -2}}'):
        with pytest.raises(ConfigurationError, match="endingOffsets must not be earliest"):
            SourceOptions.parse(LEAST | {"endingOffsets": wrong}).for_batch()


def test_secrets_are_not_shown() -> None:
    options = SourceOptions.parse(LEAST | {"kafka.sasl.password": "canary-4711"})

    assert options.client["sasl.password"] == "canary-4711"
    assert "canary-4711" not in repr(options)


@pytest.mark.parametrize(
    ("trigger", "arguments"),
    [
        ("5 seconds", {"processingTime": "5 seconds"}),
        ("1 Minute", {"processingTime": "1 minute"}),
        ("once", {"availableNow": True}),
        ("available now", {"availableNow": True}),
    ],
)
def test_a_trigger_is_said_in_words(trigger: str, arguments: dict[str, object]) -> None:
    assert trigger_arguments(trigger) == arguments


@pytest.mark.parametrize("trigger", ["", "5", "often", "0 seconds", "-1 seconds"])
def test_a_trigger_that_is_none_is_refused(trigger: str) -> None:
    with pytest.raises(ConfigurationError, match="trigger must be an interval"):
        trigger_arguments(trigger)


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [("pyspark", "register", "spark"), ("pyarrow", "SqlSink", "spark"), ("sqlalchemy", "SqlSink", "sql")],
)
def test_a_missing_package_is_answered_with_the_extra_to_install(package: str, name: str, extra: str) -> None:
    program = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "import penstock.spark_sink as spark_sink\n"
        "try: getattr(spark_sink, sys.argv[2])\n"
        "except spark_sink.ConfigurationError as error: print(error)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, package, name], capture_output=True, text=True, timeout=60, check=True
    )

    assert f"needs the package {package}" in done.stdout
    assert f"pip install 'penstock[{extra}]'" in done.stdout
