"""Why a committed message is not visible yet, as far as a producer on a store in Kafka can find out within seconds.

It looks whether the target exists, what the coordinators report, and whether any runs, on a thread that can be left
behind. What was found is good for a moment: of many that wait for the same, one looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException

from penstock import clients
from penstock.clients.bounded_calls import BriefQuestion
from penstock.clients.requests.answers import answered
from penstock.clients.requests.group_requests import describe_groups
from penstock.clients.requests.topics import partition_counts
from penstock.errors import BrokerConnectionError, PenstockError
from penstock.options import ClientConfig
from penstock.transactions.operator.inspection import Patience
from penstock.transactions.stores.kafka.coordinator.status import Status, target_text
from penstock.transactions.stores.kafka.inspection import KafkaInspection
from penstock.transactions.wire.topics import StoreTopics

#: Seconds that a look may take, that one request of it may, that it waits for brokers which do not answer at once, and
#: for which it is good.
_LIMIT_S = 8.0
_ANSWER_S = 3.0
_PATIENCE_S = 2.0
_GOOD_S = 2.0


class Observation(NamedTuple):
    """What was found at one time."""

    #: Those that exist.
    topics: frozenset[str]
    statuses: Sequence[Status]
    #: How many run; None: nobody knows.
    coordinators: int | None


class PublicationDiagnosis:
    """Finds causes. Thread-safe. `observe` may take long, or for ever."""

    def __init__(self, observe: Callable[[], Observation], store: str) -> None:
        self._observe = observe
        self._store = store
        self._question = BriefQuestion(f"look into {store}")
        # What was found last, or what that failed for, in words; and when. One thread at a time has the question.
        self._found: Observation | str = ""
        self._found_at = float("-inf")

    def cause(self, topics: Sequence[str]) -> str:
        """Return what a committed transaction to these topics waits for, in words; empty where that is not known."""
        found = self._question.ask(self._look, _LIMIT_S)
        return why(found, topics, self._store) if isinstance(found, Observation) else found or ""

    def _look(self) -> Observation | str:
        if time.monotonic() - self._found_at > _GOOD_S:
            try:
                self._found = self._observe()
            except BrokerConnectionError:
                self._found = "Kafka, of which no broker answers"
            except (PenstockError, KafkaException):
                self._found = ""
            self._found_at = time.monotonic()
        return self._found


def why(found: Observation, topics: Sequence[str], store: str) -> str:
    """Return what a committed transaction waits for, by what was found; empty where that tells nothing. Pure."""
    missing = sorted(set(topics) - found.topics)
    if missing:
        return f"topic {', '.join(missing)}, which does not exist"
    halted = next((halt for status in found.statuses for halt in status.halts), "")
    stopped = f"a coordinator of {store}: none runs, so start one" if found.coordinators == 0 else ""
    return target_text(topics, found.statuses) or stopped or halted


def observer_of(servers: str, config: ClientConfig, topics: StoreTopics) -> Callable[[], Observation]:
    """Return what observes a store in Kafka, by clients that end with the observation: see `group_requests`."""

    def observe() -> Observation:
        admin = clients.admin(servers, config)
        counts = partition_counts(admin, servers, _ANSWER_S)
        inspection = KafkaInspection(servers, config, topics, Patience(_PATIENCE_S))
        asked = describe_groups(admin, [topics.coordinators])
        coordinators: int | None
        try:
            coordinators = len(answered(asked[topics.coordinators], _ANSWER_S).members)
        except KafkaException as error:
            # None has ever been there; or a producer has not the right to ask.
            coordinators = 0 if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND else None
        return Observation(frozenset(counts), inspection.seen_statuses(), coordinators)

    return observe
