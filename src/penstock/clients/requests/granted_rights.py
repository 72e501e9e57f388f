"""Which rights a client lacks: the brokers are asked what it may do, before it is refused.

Some refusals never come: a heartbeat that is refused says nothing for a whole session. With the description of a topic
or a group the brokers tell what the client may do with it (KIP-430), whatever their authorizer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from penstock.clients.kafka_errors import is_missing_right
from penstock.clients.requests.answers import Asked
from penstock.clients.requests.group_requests import describe_groups
from penstock.clients.rights import MissingRightError, Resource, Right

#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0
#: What every client may that gets an answer on a topic or a group.
_ALWAYS = "DESCRIBE"
#: A kind of resource, and a name.
_Place = tuple[Resource, str]


@dataclass(frozen=True, slots=True)
class Rights:
    """What the brokers answered."""

    #: Rights that were asked for and that the client has.
    held: tuple[Right, ...] = ()
    #: Those that it lacks.
    missing: tuple[Right, ...] = ()
    #: Those without an answer: there is no such topic, or the brokers do not tell rights.
    unknown: tuple[Right, ...] = ()


def ask_rights(admin: AdminClient, needed: Iterable[Right], timeout_s: float) -> Asked[_Place, Any, Rights]:
    """Ask for the rights of this client; `KafkaException` where the client library refuses to ask.

    Where rights on groups are asked for, `admin` is of this question alone: see `group_requests`.
    """
    wanted = list(dict.fromkeys(needed))
    topics, groups = (
        list(dict.fromkeys(right.name for right in wanted if right.resource is kind))
        for kind in (Resource.TOPIC, Resource.GROUP)
    )
    asked: dict[_Place, Future[Any]] = {}
    if topics:
        names = TopicCollection(topics)
        found = admin.describe_topics(names, request_timeout=timeout_s, include_authorized_operations=True)
        asked |= {(Resource.TOPIC, name): future for name, future in found.items()}
    if groups:
        found = describe_groups(admin, groups, with_rights=True)
        asked |= {(Resource.GROUP, name): future for name, future in found.items()}
    return Asked(admin, asked, timeout_s, partial(_read, wanted))


def _read(wanted: Iterable[Right], found: Mapping[_Place, Any], failed: Mapping[_Place, KafkaException]) -> Rights:
    allowed = {place: {each.name for each in topic.authorized_operations or ()} for place, topic in found.items()}
    # An answer without what every client may that gets one is none.
    allowed = {place: names for place, names in allowed.items() if _ALWAYS in names}
    allowed |= {place: set() for place, error in failed.items() if is_missing_right(error)}
    held, missing, unknown = list[Right](), list[Right](), list[Right]()
    for right in wanted:
        operations = allowed.get((right.resource, right.name))
        which = unknown if operations is None else held if right.operation.name in operations else missing
        which.append(right)
    return Rights(tuple(held), tuple(missing), tuple(unknown))


def missing_rights(admin: AdminClient, needed: Iterable[Right], timeout_s: float = _ANSWER_S) -> list[Right]:
    """Return the rights that a client lacks, as far as brokers tell; `KafkaException` where nothing can be asked."""
    return list(ask_rights(admin, needed, timeout_s).wait().missing)


def require_rights(
    admin: AdminClient, what: str, needed: Iterable[Right], principal: str, timeout_s: float = _ANSWER_S
) -> None:
    """Raise where a client lacks rights: tried instead, each would fail with a code, and some with a misleading one.

    `what` cannot be done without them, as the beginning of a sentence. What brokers tell nothing of is passed over: the
    use itself tells. `KafkaException` where the client library refused to ask, `MissingRightError` names all missing.
    """
    if missing := missing_rights(admin, needed, timeout_s):
        raise MissingRightError(what, missing, principal)
