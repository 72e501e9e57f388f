"""The permissions of what writes offsets for lag tools; those of source and sinks are in tests/security."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.devbroker import DevBroker, User
from penstock.spark_sink.monitoring.group_offsets import GroupOffsets
from rights import give, on_group, on_topic, take


def test_offsets_of_a_group_that_may_not_be_written_are_told_at_once_and_written_when_they_may(
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

    offsets.warn_missing_rights([topic])
    assert offsets.advance({(topic, 0): 1}) == {(topic, 0): 1}
    assert caplog.text == ""
    for number, right in enumerate(rights, start=2):
        position = {(topic, 0): number}
        take(secured, user, [right])
        caplog.clear()
        offsets.warn_missing_rights([topic])
        assert f"--allow-principal 'User:{user.name}' --operation Read --{right.resource} '{right.name}'" in caplog.text
        assert offsets.advance(position) == {}
        assert caplog.text.count("lacks the right") == 1, "it is told once"
        give(secured, user, [right])
        assert offsets.advance(position) == position
    offsets.close()
