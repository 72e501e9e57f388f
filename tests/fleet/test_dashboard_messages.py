"""A message on the page, read by a user without the permission."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.devbroker import DevBroker, User
from penstock.errors import PenstockError
from penstock.fleet.page.server import read_message


@pytest.mark.parametrize(
    ("given", "said"), [([], "this user may not see it"), (["describe"], "Topic authorization failed")]
)
def test_a_message_that_may_not_be_read_is_refused_with_the_reason(
    given: list[str], said: str, secured: DevBroker, new_user: Callable[..., User]
) -> None:
    user = new_user()
    topic = f"{user.name}-orders"
    secured.create_topic(topic)
    for operation in given:
        secured.allow(user, operation, topic=topic)

    with pytest.raises(PenstockError, match=f"{topic}:0@0 did not come: .*{said}"):
        read_message(secured.bootstrap_servers, user.config, topic, 0, 0)
