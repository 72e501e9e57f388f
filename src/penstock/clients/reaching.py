"""Asks brokers for the first time, and does not wait where the client says that waiting is of no use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from penstock.clients.causes import ClientWords
from penstock.errors import BrokerConnectionError

T = TypeVar("T")

#: Seconds between two looks at what the client says.
_LOOK_S = 0.02
#: Seconds for which an address is tried whose connections end early, which a wrong protocol does.
_ENDS_EARLY_S = 3.0


def first_answer(admin: AdminClient, bootstrap_servers: str, timeout_s: float, ask: Callable[[], T]) -> T:
    """Return what the first question of a client gives, asked on a thread of its own by `ask` for `timeout_s` seconds.

    Raises:
        BrokerConnectionError: no broker answered in time; or at once, where none will let this client in.
    """
    words: ClientWords = getattr(admin, "words", None) or ClientWords({}, None)
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            answer.set_exception(error)

    # The library waits for its whole time, whatever it has said meanwhile; left behind, the thread ends with that time.
    threading.Thread(target=run, name="penstock-ask", daemon=True).start()
    begun, looked = time.monotonic(), threading.Event()
    while not answer.done():
        looked.wait(_LOOK_S)
        admin.poll(0)
        ended_early = words.cause is not None and words.cause.may_pass and bool(words.cause.remedy)
        hopeless = ended_early and time.monotonic() - begun > _ENDS_EARLY_S
        if not answer.done() and (hopeless or words.refused_by_all(bootstrap_servers)):
            raise BrokerConnectionError(f"no Kafka broker lets this client in at {bootstrap_servers}: {words.cause}")
    try:
        found = answer.result()
    except KafkaException as error:
        admin.poll(0)
        raise not_answered(bootstrap_servers, timeout_s, error, words) from error
    words.clear()
    return found


def not_answered(
    bootstrap_servers: str, timeout_s: float, error: KafkaException, words: ClientWords | None = None
) -> BrokerConnectionError:
    """Return the error that says that no broker answered, and why, with the client's words where it has some."""
    inner = error.args[0]
    cause = None if words is None else words.cause
    said = f"{inner.str()} ({inner.name()})" if cause is None else str(cause)
    if cause is None or not cause.remedy:
        said += "; check the address, that the broker runs, and its security settings"
    return BrokerConnectionError(f"no Kafka broker answered at {bootstrap_servers} within {timeout_s:g} s: {said}")
