"""What a sink may do on its topics, asked before it tries: all that is missing is one error, on the driver.

Tried instead, it would be told a code at a time, on executors, and by the client library sometimes another one: a
transaction that lacks WRITE on a topic ends as INVALID_TXN_STATE.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka.admin import AdminClient

from penstock.asked_rights import AskedRights
from penstock.rights import MissingRightError, Right

#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0


def missing_rights(admin: AdminClient, needed: Iterable[Right]) -> list[Right]:
    """Return those rights on topics and groups that a client lacks, as far as the brokers tell.

    Raises:
        KafkaException: the client library refused to ask.
    """
    return list(AskedRights(admin, needed, _ANSWER_S).wait().missing)


def require_rights(admin: AdminClient, what: str, needed: Iterable[Right], principal: str) -> None:
    """Raise where a client lacks rights on topics or groups.

    Args:
        admin: a client of the one who needs them.
        what: what cannot be done without, as the beginning of a sentence.
        needed: the rights. What brokers tell nothing of is passed over: the use itself says what is the matter.
        principal: whom they are to be given to.

    Raises:
        KafkaException: the client library refused to ask.
        MissingRightError: all that are missing are named.
    """
    missing = missing_rights(admin, needed)
    if missing:
        raise MissingRightError(what, missing, principal)


__all__ = ["missing_rights", "require_rights"]
