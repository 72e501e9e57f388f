"""What brokers refuse a member of a group for want of a right: said with the command that grants it.

Brokers are asked what a consumer may do before it starts (`poll/topics.py`). While it runs, it says what they refuse.
The client goes on by itself once the right is granted. Writes that are refused are shown with the messages that wait
for them, by `DeadLetterPublisher` and `HandlerResults`.
"""

from __future__ import annotations

from confluent_kafka import KafkaError

from penstock.clients.ration import once_in, rationed
from penstock.clients.rights import THIS_CLIENT, Operation, group_right, missing_right_text, topic_right

_log = rationed(__name__)

#: Seconds between two log lines about the same missing right.
_LOG_AGAIN_S = 60.0


class Refusals:
    """On the poll thread only, save `of_group`, which any thread may read."""

    def __init__(self, group: str) -> None:
        self._group = group
        #: Whom the brokers take the client for. Set before the start.
        self.principal = THIS_CLIENT
        #: Why the group does not take this member or its commits; None once it has taken one of them.
        self.of_group: str | None = None

    def note(self, error: KafkaError, topic: str | None, now: float) -> None:
        """Take a refusal and log what is missing; it may be of the group, whatever the topic is."""
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and topic:
            text = self.of_topic(topic)
        else:
            what = f"group {self._group} can neither be joined nor commit"
            text = self.of_group = missing_right_text(what, [group_right(self._group)], self.principal)
        _log.error("%s; it goes on by itself once it is given", text, extra=once_in(_LOG_AGAIN_S, text, now))

    def of_topic(self, topic: str) -> str:
        """Return what is missing to read a topic, and what grants it."""
        what = f"topic {topic} cannot be read, so that nothing more of it is handled"
        return missing_right_text(what, [topic_right(Operation.READ, topic)], self.principal)
