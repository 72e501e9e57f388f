"""Halves, made from the arguments of a send after these were checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from penstock.errors import ConfigurationError
from penstock.message import Headers
from penstock.options import not_negative
from penstock.outgoing import Outgoing, UserHeaders, as_headers, encoded, require_place
from penstock.transactions.model import HalfMessage
from penstock.transactions.wire.half import MAX_PARTS, RESERVED_PREFIX, Half

#: The longest delay that is accepted: a hundred years.
_MAX_DELAY_S = 100 * 365 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Terms:
    """The options that all messages of a transaction share.

    Attributes:
        immunity_ms: milliseconds from birth before the first check, or None.
        deliver_at_ms: the time to publish, in milliseconds since the epoch, or None.
        by_half: whether messages of one key are published in the order of their halves.
    """

    immunity_ms: int | None = None
    deliver_at_ms: int | None = None
    by_half: bool = False


def terms(check_immunity: float | None, deliver_at: datetime | float | None, *, by_half: bool) -> Terms:
    """Return the options of a transaction; a wrong one raises `ConfigurationError`."""
    immunity_ms = None
    if check_immunity is not None:
        not_negative("check_immunity", check_immunity)
        if check_immunity > _MAX_DELAY_S:
            raise ConfigurationError(f"check_immunity must be at most {_MAX_DELAY_S:g} s, but is {check_immunity!r}")
        immunity_ms = int(check_immunity * 1000)
    deliver_at_ms = None
    if deliver_at is not None:
        if by_half:
            raise ConfigurationError(
                'deliver_at does not work with order="half": a waiting message would hold all later ones of its key'
            )
        deliver_at_ms = _milliseconds(deliver_at)
    return Terms(immunity_ms, deliver_at_ms, by_half)


def _milliseconds(at: datetime | float) -> int:
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise ConfigurationError("deliver_at must say its time zone: datetime.now(timezone.utc) does")
        at = at.timestamp()
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e11:  # noqa: PLR2004 - the year 5138
        raise ConfigurationError(f"deliver_at must be a datetime or seconds since the epoch, but is {at!r}")
    return int(at * 1000)


def halves(
    transaction_id: str, group: str, messages: Sequence[Outgoing], shared: Terms, ordering_key: bytes | None
) -> list[Half]:
    """Return the halves of a transaction of several messages; a wrong argument raises `ConfigurationError`.

    `ordering_key` orders the transaction among others; None: the first message's key.
    """
    count = len(messages)
    if not 1 <= count <= MAX_PARTS:
        raise ConfigurationError(f"a transaction has 1 to {MAX_PARTS} messages, but this one has {count}")
    unnumbered = [half_of(transaction_id, group, shared, message) for message in messages]
    order_key = (unnumbered[0].key if ordering_key is None else ordering_key) if shared.by_half else None
    parts = [(number, count) if count > 1 else None for number in range(1, count + 1)]
    return [half._replace(part=part, order_key=order_key) for half, part in zip(unnumbered, parts, strict=True)]


def half_of(transaction_id: str, group: str, shared: Terms, message: Outgoing) -> Half:
    """Return the half of one message; a wrong argument raises `ConfigurationError`."""
    return a_half(
        transaction_id, group, shared, message.topic, message.key, message.value, message.headers, message.partition
    )


def a_half(  # noqa: PLR0917 - the arguments of a send
    transaction_id: str,
    group: str,
    shared: Terms,
    topic: str,
    key: bytes | str | None,
    value: bytes | str | None,
    headers: UserHeaders,
    partition: int | None,
) -> Half:
    """Return the half of one message; a wrong argument raises `ConfigurationError`."""
    require_place(topic, partition)
    if type(key) is not bytes and key is not None:
        key = encoded("key", key)
    if type(value) is not bytes and value is not None:
        value = encoded("value", value)
    checked = _headers(headers) if headers else ()
    order = key if shared.by_half else None
    immunity_ms, due_ms = shared.immunity_ms, shared.deliver_at_ms
    fields = (transaction_id, group, topic, partition, key, value, checked, immunity_ms, due_ms, None, order, None)
    # Like `Half(...)`, in half the time: a producer makes thousands a second.
    return tuple.__new__(Half, fields)


def _headers(headers: UserHeaders) -> Headers:
    checked = as_headers(headers)
    for name, _ in checked:
        if name.startswith(RESERVED_PREFIX):
            raise ConfigurationError(f"header names must not begin with {RESERVED_PREFIX!r}, but one is {name!r}")
    return tuple(checked)


def as_seen(half: Half, check_count: int) -> HalfMessage:
    """Return a half as a user's function sees it; `check_count` checks were answered UNKNOWN before."""
    return HalfMessage(half.topic, half.key, half.value, half.headers, half.transaction_id, check_count)
