"""The permissions of what writes offsets for lag tools; those of source and sinks are in tests/security."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, TopicPartition

from penstock.devbroker import DevBroker, User
from penstock.spark_sink.progress import GroupOffsets
from rights import give, on_group, on_topic, take
from waiting import wait_until


@pytest.mark.thorough
def test_offsets_of_a_group_that_may_not_be_written_are_told_once_and_written_when_they_may(
    secured: DevBroker,
    new_user: Callable[..., User],
    new_secured_topic: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = new_secured_topic()
    group = f"group-of-{topic}"
    rights = [*on_group(group, "READ"), *on_topic(topic, "READ")]
    user = new_user(*rights)
    offsets = GroupOffsets(group, bootstrap_servers=secured.bootstrap_servers, config=user.config)
    onlooker = Consumer({**user.config, "bootstrap.servers": secured.bootstrap_servers, "group.id": group})

    def is_written(number: int) -> bool:
        offsets.follow({(topic, 0): number})
        (found,) = onlooker.committed([TopicPartition(topic, 0)], timeout=30)
        return found.error is None and found.offset == number

    wait_until(lambda: is_written(1))
    assert caplog.text == ""
    for number, right in enumerate(rights, start=2):
        take(secured, user, [right])
        caplog.clear()
        wait_until(lambda number=number: offsets.follow({(topic, 0): number}) or "lacks the right" in caplog.text)
        assert f"--allow-principal 'User:{user.name}' --operation Read --{right.resource} '{right.name}'" in caplog.text
        offsets.follow({(topic, 0): number})
        assert caplog.text.count("lacks the right") == 1, "it is told once"
        give(secured, user, [right])
        wait_until(lambda number=number: is_written(number))
    offsets.close()
    onlooker.close()
