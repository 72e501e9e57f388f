"""Which rights a client lacks: the brokers are asked what it may do, before it is refused.

Some refusals never come: a heartbeat that is refused says nothing for a whole session. With the description of a topic
or a group the brokers tell what the client may do with it (KIP-430), whatever their authorizer is.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from penstock.clients.kafka_errors import is_missing_right
from penstock.clients.requests.answers import Asked
from penstock.clients.requests.group_requests import describe_groups
from penstock.clients.rights import MissingRightError, Resource, Right

#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0
#: What every client may that gets an answer on a topic or a group.
_ALWAYS = "DESCRIBE"


@dataclass(frozen=True, slots=True)
class Rights:
    """What the brokers answered."""

    #: Rights that were asked for and that the client has.
    held: tuple[Right, ...] = ()
    #: Those that it lacks.
    missing: tuple[Right, ...] = ()
    #: Those without an answer: there is no such topic, or the brokers do not tell rights.
    unknown: tuple[Right, ...] = ()


class AskedRights:
    """A question for the rights of this client, sent when it is made; `KafkaException` where that is refused.

    Where rights on groups are asked for, `admin` is of this question alone: see `group_requests`.
    """

    def __init__(self, admin: AdminClient, needed: Iterable[Right], timeout_s: float) -> None:
        self._admin = admin
        self._needed = list(dict.fromkeys(needed))
        topics, groups = self._names(Resource.TOPIC), self._names(Resource.GROUP)
        asked: dict[tuple[Resource, str], Future[Any]] = {}
        if topics:
            names = TopicCollection(topics)
            found = admin.describe_topics(names, request_timeout=timeout_s, include_authorized_operations=True)
            asked |= {(Resource.TOPIC, name): future for name, future in found.items()}
        if groups:
            found = describe_groups(admin, groups, with_rights=True)
            asked |= {(Resource.GROUP, name): future for name, future in found.items()}
        self._asked = Asked(asked, timeout_s)

    def _names(self, kind: Resource) -> list[str]:
        return list(dict.fromkeys(right.name for right in self._needed if right.resource is kind))

    def answer(self) -> Rights | None:
        """Return what was answered; None as long as it is not complete and its time is not over."""
        return self.wait() if self._asked.is_over else None

    def wait(self) -> Rights:
        """Return what was answered, waiting for it until its time is over."""
        found, failed = self._asked.answers()
        allowed = {place: {each.name for each in topic.authorized_operations or ()} for place, topic in found.items()}
        # An answer without what every client may that gets one is none.
        allowed = {place: names for place, names in allowed.items() if _ALWAYS in names}
        allowed |= {place: set() for place, error in failed.items() if is_missing_right(error)}
        held, missing, unknown = list[Right](), list[Right](), list[Right]()
        for right in self._needed:
            operations = allowed.get((right.resource, right.name))
            which = unknown if operations is None else held if right.operation.name in operations else missing
            which.append(right)
        return Rights(tuple(held), tuple(missing), tuple(unknown))


def missing_rights(admin: AdminClient, needed: Iterable[Right], timeout_s: float = _ANSWER_S) -> list[Right]:
    """Return the rights that a client lacks, as far as brokers tell; `KafkaException` where nothing can be asked."""
    return list(AskedRights(admin, needed, timeout_s).wait().missing)


def require_rights(
    admin: AdminClient, what: str, needed: Iterable[Right], principal: str, timeout_s: float = _ANSWER_S
) -> None:
    """Raise where a client lacks rights: tried instead, each would fail with a code, and some with a misleading one.

    `what` cannot be done without them, as the beginning of a sentence. What brokers tell nothing of is passed over: the
    use itself tells. `KafkaException` where the client library refused to ask, `MissingRightError` names all missing.
    """
    if missing := missing_rights(admin, needed, timeout_s):
        raise MissingRightError(what, missing, principal)
