"""A broker that takes less commit metadata than Kafka does by default: commits go on, with what of the map it takes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import tenacity

from kafka_tools import committed, produce
from penstock.consumer import handler, retry
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.offsets import decode, owner_of
from support.consumers import consumer_of
from waiting import wait_until

pytestmark = pytest.mark.thorough


COUNT = 8000


@pytest.fixture
def small_broker() -> Iterator[DevBroker]:
    """Return a broker that keeps 511 characters of metadata."""
    with DevBroker(config={"offset.metadata.max.bytes": "512"}) as broker:
        yield broker


def test_a_broker_that_takes_short_metadata_only_has_the_offsets_and_the_beginning_of_the_map(
    small_broker: DevBroker, caplog: pytest.LogCaptureFixture
) -> None:
    small_broker.create_topic("small", partitions=1)
    produce(small_broker.bootstrap_servers, "small", ((b"k%d" % i, b"x") for i in range(COUNT)))
    waiting = retry(attempts=100, wait=tenacity.wait_fixed(600))

    def function(message: Message) -> None:
        if message.offset > 3 and zlib.crc32(b"%d" % message.offset) % 3 == 0:
            raise ValueError

    def group_has() -> tuple[int, str | None]:
        (one,) = committed(small_broker.bootstrap_servers, "group-small", "small", 1).values()
        return one.offset, one.metadata

    handlers = {"small": handler(function, retry=waiting)}
    with consumer_of(small_broker, handlers) as consumer:
        wait_until(lambda: (one := consumer.statistics()).handled + one.failed == COUNT and one.failed_commits)
        wait_until(lambda: all(one.acknowledged for one in consumer._engine.assignments.all()))
        offset, metadata = group_has()
        consumer.request_stop(now=True)
    with consumer_of(small_broker, handlers) as consumer:
        restored = wait_until(lambda: consumer.statistics().restored)
        consumer.request_stop(now=True)

    warnings = [record for record in caplog.records if "offset.metadata.max.bytes" in record.getMessage()]
    assert offset > 3
    assert metadata is not None
    assert len(metadata) < 512
    assert decode(offset, metadata, owner_of("group-small", "small", 0)) is not None
    assert restored > 100
    # One for each consumer that began again.
    assert 1 <= len(warnings) <= 2
