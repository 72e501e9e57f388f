"""Which targets can take messages now: brokers that answer, and topics that exist.

After a failure nothing is published before the brokers that a Kafka transaction needs have answered. A separate thread
fetches the list of topics. No caller waits for either. Each question has a time limit, on a thread that can be left
behind: inside a Kafka transaction, the client library waits for a group's coordinator without end.
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

#: Seconds for one question to the brokers, and between two.
_QUESTION_LIMIT_S = 5.0
_RETRY_DELAY_S = 0.2


class BrokerGate:
    """Closed from a failure until the brokers answer. Used by one thread; never waits.

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
        """Close it after a failure: the brokers are asked before anything is tried again."""
        self.is_open = False

    def poll(self, now: float) -> bool:
        """Ask the brokers if it is closed, and take their answer. Tell whether it opens now."""
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


#: Seconds between two fetches of the list of topics: while a topic is missing, and otherwise.
_METADATA_INTERVAL_S = 1.0
_IDLE_METADATA_INTERVAL_S = 5.0

#: Most missing topics to look up by name in one round.
_MAX_LOOKUPS = 20
#: Seconds in which brokers must answer.
_ANSWER_S = 5.0

#: Why a topic cannot take a message before a list was fetched that could have it.
NOT_KNOWN = "is not known yet"


class Targets:
    """The target topics of one coordinator. Its thread uses it; fetches have their own. Times are monotonic seconds.

    `ask` returns the partition count of every topic, or raises `PenstockError`. `hidden` takes topics that are not in
    that list. It returns those that this client has no permission to see, each with the missing right. Both may take
    seconds.
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
        #: Partition counts by topic. The fetching thread replaces it as a whole, the coordinator's thread reads it.
        self.counts: Mapping[str, int] = {}
        # Hidden topics, in the same way.
        self._hidden: Mapping[str, str] = {}
        # How many lists were fetched. By topic that was not found, how many it takes until that is certain.
        self._lists = 0
        self._missed: dict[str, int] = {}
        self._asked = -_METADATA_INTERVAL_S
        # Set by the coordinator's thread when a fetch starts, cleared by the fetching thread when it ends.
        self._asking = threading.Event()
        # Set when the first fetch has ended, with or without a list.
        self._heard = threading.Event()

    def has(self, topic: str, partitions: int) -> bool:
        """Tell whether a topic is known to have at least so many partitions."""
        return self.counts.get(topic, 0) >= partitions

    def missing(self, topic: str, partitions: int, now: float) -> str | None:
        """Return why a topic cannot take a message now. None: it exists with at least so many partitions."""
        if self.has(topic, partitions):
            self._missed.pop(topic, None)
            return None
        self.look(now)
        # A fetch that was under way before this question does not count.
        if self._lists < self._missed.setdefault(topic, self._lists + 1 + self._asking.is_set()):
            return NOT_KNOWN
        lacking = self._hidden.get(topic)
        if lacking is not None:
            return f"is not to be seen: {lacking}"
        return f"does not exist with {partitions} partitions or more; create it"

    def look_now_and_then(self, now: float) -> None:
        """Fetch the list every few seconds, to notice a deleted topic before a Kafka transaction fails for it."""
        if now - self._asked >= _IDLE_METADATA_INTERVAL_S:
            self.look(now)

    @property
    def were_heard(self) -> bool:
        """Whether the first fetch of the list has ended."""
        return self._heard.is_set()

    def look(self, now: float) -> None:
        """Start fetching the list, unless the last fetch is recent. Does not wait."""
        if self._asking.is_set() or now - self._asked < _METADATA_INTERVAL_S:
            return
        self._asked = now
        self._asking.set()
        threading.Thread(target=self._look, name=f"penstock-coordinator-looks-{self._name}", daemon=True).start()

    def _look(self) -> None:
        try:
            counts = self._ask()
            # Copying a dict's keys is atomic under the interpreter lock. Hidden topics are set before the list counts,
            # so that a topic missing there is explained by then.
            missed = [topic for topic in list(self._missed) if topic not in counts]
            self._hidden = self._ask_hidden(missed[:_MAX_LOOKUPS]) if missed else {}
            self._lists += 1
            self.counts = counts
        except PenstockError as error:
            _log.warning("%s; what is committed to topics not known yet waits", error)
        finally:
            self._asking.clear()
            self._heard.set()


def cluster_targets(admin: AdminClient, name: str, rights: MissingRights) -> Targets:
    """Return the targets of a cluster. Rights that are missing to see a topic are noted in `rights`."""

    def hidden(missed: Sequence[str]) -> Mapping[str, str]:
        return {
            topic: rights.lacks(topic_right(Operation.WRITE, topic))
            for topic in hidden_topics(admin, missed, _ANSWER_S)
        }

    return Targets(lambda: partition_counts(admin, _ANSWER_S), name, hidden)
