"""Why a committed message is not visible yet, as far as a producer on a store in Kafka can find out within seconds.

It observes whether the target exists, what the coordinators report, and whether any runs, on a thread that can be left
behind. An observation is good for a moment: of many that wait for the same, one makes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from penstock import clients
from penstock.clients.bounded_calls import Disposable, LeftBehind, NotAnsweredError
from penstock.clients.requests.answers import answered
from penstock.clients.requests.group_requests import describe_groups
from penstock.clients.requests.topics import partition_counts
from penstock.errors import BrokerConnectionError, PenstockError
from penstock.options import ClientConfig
from penstock.transactions.stores.kafka.coordinator.status import Status
from penstock.transactions.stores.kafka.inspection import KafkaInspection
from penstock.transactions.stores.kafka.obstacles import target_text
from penstock.transactions.wire.topics import StoreTopics

#: Seconds that an observation may take, that one request of it may, and for which it is good.
_LIMIT_S = 8.0
_ANSWER_S = 3.0
_GOOD_S = 2.0


class Observation(NamedTuple):
    """What was found at one time."""

    #: Those that exist.
    topics: frozenset[str]
    statuses: Sequence[Status]
    #: How many run; None: nobody knows.
    coordinators: int | None


class PublicationDiagnosis:
    """Finds causes, by observations that may take long, or for ever. Thread-safe."""

    def __init__(self, observe: Callable[[], Observation], store: str) -> None:
        self._observe = observe
        self._store = store
        self._left = LeftBehind(f"observations of producers at {store}")
        # Guards what follows, and lets one thread observe at a time.
        self._lock = threading.Lock()
        self._seen: Observation | str | None = None
        self._seen_at = 0.0

    def cause(self, transaction_id: str, topics: Sequence[str]) -> str:
        """Return what a committed transaction waits for, in words; empty where that is not known."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen_at > _GOOD_S:
                self._seen = self._observe_bounded()
                self._seen_at = time.monotonic()
            seen = self._seen
        return seen if isinstance(seen, str) else why(seen, transaction_id, topics, self._store)

    def _observe_bounded(self) -> Observation | str:
        if self._left.hanging:
            # The last one hangs still.
            return ""
        thread = Disposable(f"penstock-diagnosis-{self._store}", self._left)
        try:
            return thread.run("an observation of the store", self._observe, _LIMIT_S, lambda: None)
        except BrokerConnectionError:
            return "Kafka, of which no broker answers"
        except (NotAnsweredError, PenstockError, KafkaException):
            return ""
        finally:
            thread.close()


def why(seen: Observation, transaction_id: str, topics: Sequence[str], store: str) -> str:
    """Return what a committed transaction waits for, by what was seen; empty where that tells nothing. Pure."""
    missing = sorted(set(topics) - seen.topics)
    if missing:
        return f"topic {', '.join(missing)}, which does not exist"
    by_target = target_text(transaction_id, topics, seen.statuses)
    return by_target or _lacking(seen.statuses) or _without_status(seen, store)


def _lacking(statuses: Sequence[Status]) -> str:
    lacking = next((why for status in statuses for why in status.rights.values()), None)
    return "" if lacking is None else f"a right of its coordinator: {lacking}"


def _without_status(seen: Observation, store: str) -> str:
    if seen.coordinators == 0:
        return f"a coordinator of {store}: none runs, so start one"
    slow = next((status for status in seen.statuses if status.slow_call), None)
    return "" if slow is None else f"Kafka: {slow.slow_call} of coordinator {slow.coordinator} does not return"


def observer_of(
    servers: str, config: ClientConfig, inspection: KafkaInspection, topics: StoreTopics
) -> Callable[[], Observation]:
    """Return what observes a store in Kafka, by a client that ends with the observation: see `group_requests`."""

    def observe() -> Observation:
        admin = clients.admin(servers, config)
        counts = partition_counts(admin, servers, _ANSWER_S)
        return Observation(frozenset(counts), inspection.seen_statuses(), _coordinators(admin, topics))

    return observe


def _coordinators(admin: AdminClient, topics: StoreTopics) -> int | None:
    asked = describe_groups(admin, [topics.coordinators])
    try:
        return len(answered(asked[topics.coordinators], _ANSWER_S).members)
    except KafkaException as error:
        # None has ever been there; or a producer has not the right to ask.
        return 0 if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND else None
