"""Arguments of a producer, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from penstock.errors import ConfigurationError
from penstock.options import a_plain_function
from penstock.transactions.model import Wait

if TYPE_CHECKING:
    from penstock.transactions.producer.check_responder import Check
    from penstock.transactions.producer.listeners import TransactionCheckListener, TransactionListener

#: What a send may wait for.
WAITS: tuple[str, ...] = get_args(Wait)


def check_of(
    check: Check | None, listener: TransactionListener | None, check_listener: TransactionCheckListener | None
) -> Check | None:
    """Return the one check among the ways to give it."""
    given = [
        *([check] if check is not None else []),
        *([listener.check_local_transaction] if listener is not None else []),
        *([check_listener.check_local_transaction_state] if check_listener is not None else []),
    ]
    if len(given) > 1:
        raise ConfigurationError("give one of check, listener and check_listener: a transaction has one check")
    if not given:
        return None
    a_plain_function("check", given[0])
    return given[0]


def one_of(option: str, value: object, *choices: str) -> None:
    """Raise `ConfigurationError` unless a value is one of the choices."""
    if value not in choices:
        raise ConfigurationError(f"{option} must be one of {', '.join(map(repr, choices))}, but is {value!r}")
