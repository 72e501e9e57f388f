"""What can take messages now: brokers that answer, and topics that exist.

After a failure nothing is published before the brokers that a Kafka transaction needs have answered. The list of topics
is fetched by a thread of its own. Nobody waits for either: each question has a time limit, on a thread that can be left
behind, since the client library waits for a group's coordinator without end in the midst of a Kafka transaction.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import BackgroundCall, LeftBehind, NotAnsweredError
from penstock.clients.factory import AdminClient
from penstock.clients.kafka_errors import reason
from penstock.clients.rights import Operation, topic_right
from penstock.clients.topics import hidden_topics, partition_counts
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import PenstockError

_log = logging.getLogger("penstock.transactions")

#: Seconds for one question, and between two.
_QUESTION_LIMIT_S = 5.0
_RETRY_DELAY_S = 0.2


class BrokerGate:
    """Open as long as nothing failed, and from an answer on. Used by one thread; waits for nothing.

    `ask` returns once the brokers have answered, or raises `KafkaException`.
    """

    def __init__(self, ask: Callable[[], object], left: LeftBehind) -> None:
        self._ask = ask
        self._left = left
        self._question: BackgroundCall[bool] | None = None
        self._not_before = 0.0
        #: Whether transactions may begin.
        self.is_open = True

    def shut(self) -> None:
        """Something failed: ask, before anything is tried again."""
        self.is_open = False

    def poll(self, now: float) -> bool:
        """Ask, if it is shut, and take the answer; tell whether it has opened now."""
        if self._question is None:
            if not self.is_open and now >= self._not_before:
                self._question = BackgroundCall(
                    "asking whether brokers answer", self._answered, _QUESTION_LIMIT_S, self._left
                )
            return False
        try:
            has_answered = self._question.answer() is not None
        except (KafkaException, NotAnsweredError) as error:
            text = reason(error) if isinstance(error, KafkaException) else error
            _log.debug("the brokers do not answer: %s", text)
            self._question, self._not_before = None, now + _RETRY_DELAY_S
            return False
        if has_answered:
            self._question, self.is_open = None, True
        return has_answered

    def _answered(self) -> bool:
        self._ask()
        return True


#: Seconds between two questions for the list of topics.
_METADATA_INTERVAL_S = 1.0
#: Seconds between two looks where nobody misses a topic.
_IDLE_METADATA_INTERVAL_S = 5.0

#: Missing topics that are asked for by name, in one round.
_ASKED_FOR = 20
#: Seconds in which brokers shall answer.
_ANSWER_S = 5.0

#: Why a topic cannot take a message that nobody has heard of yet: the list that comes next may have it.
NOT_KNOWN = "is not known yet"


class Targets:
    """The targets of one coordinator. Used by its thread, save for the looks; times are monotonic seconds.

    `ask` returns the partitions of every topic, or raises `PenstockError`; `hidden`, of topics that are not in the
    list, those that may not be seen, each with what is missing for it. Both may take seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[str, int]],
        name: str,
        hidden: Callable[[Sequence[str]], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self._ask = ask
        self._name = name
        self._ask_hidden = hidden
        # As the counts: topics that may not be seen.
        self._hidden: Mapping[str, str] = {}
        # Replaced as a whole by the thread that asks, read by the coordinator's.
        self._counts: Mapping[str, int] = {}
        # Lists that arrived, changed or not; and by topic how many had, when it was first not found.
        self._lists = 0
        self._missed: dict[str, int] = {}
        self._asked = -_METADATA_INTERVAL_S
        # Set while a thread asks, by the one that starts it, cleared by itself when it ends.
        self._asking = threading.Event()
        # Set when the first question had an answer, or none.
        self._heard = threading.Event()

    def has(self, topic: str, partitions: int) -> bool:
        """Tell whether a topic is known to have so many partitions, at least."""
        return self._counts.get(topic, 0) >= partitions

    def missing(self, topic: str, partitions: int, now: float) -> str | None:
        """Say why a topic cannot take a message now, or None where it is there with so many partitions, at least."""
        if self.has(topic, partitions):
            self._missed.pop(topic, None)
            return None
        self.look(now)
        # A list that was asked for before does not count: one may have been under way.
        if self._lists < self._missed.setdefault(topic, self._lists + 1 + self._asking.is_set()):
            return NOT_KNOWN
        lacking = self._hidden.get(topic)
        if lacking is not None:
            return f"is not to be seen: {lacking}"
        return f"does not exist with {partitions} partitions or more; create it"

    def look_now_and_then(self, now: float) -> None:
        """Have the list fetched every few seconds: a topic that was deleted is better found out before it fails."""
        if now - self._asked >= _IDLE_METADATA_INTERVAL_S:
            self.look(now)

    @property
    def were_heard(self) -> bool:
        """Whether the list was fetched once, or could not be."""
        return self._heard.is_set()

    def look(self, now: float) -> None:
        """Have the list fetched, if the last one is not of a moment ago. Does not wait."""
        if self._asking.is_set() or now - self._asked < _METADATA_INTERVAL_S:
            return
        self._asked = now
        self._asking.set()
        threading.Thread(target=self._look, name=f"penstock-coordinator-looks-{self._name}", daemon=True).start()

    def _look(self) -> None:
        try:
            counts = self._ask()
            # A copy of a dict's keys is one step under the interpreter lock. Who is hidden is known before the list
            # counts: what is missing in it is explained by then.
            missed = [topic for topic in list(self._missed) if topic not in counts]
            self._hidden = self._ask_hidden(missed[:_ASKED_FOR]) if missed else {}
            self._lists += 1
            self._counts = counts
        except PenstockError as error:
            _log.warning("%s; what is committed to topics not known yet waits", error)
        finally:
            self._asking.clear()
            self._heard.set()


def cluster_targets(admin: AdminClient, name: str, rights: MissingRights) -> Targets:
    """Return the targets of a cluster; a right that is missing to see one is noted in `rights`."""

    def hidden(missed: Sequence[str]) -> Mapping[str, str]:
        return {
            topic: rights.lacks(topic_right(Operation.WRITE, topic))
            for topic in hidden_topics(admin, missed, _ANSWER_S)
        }

    return Targets(lambda: partition_counts(admin, _ANSWER_S), name, hidden)
