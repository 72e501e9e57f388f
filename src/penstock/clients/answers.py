"""Waits for the brokers' answers, within time limits that we hold, and stops early when no answer can come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.bounded_calls import BackgroundCall, LeftBehind, NotAnsweredError, ask_again
from penstock.clients.factory import AdminClient
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.errors import BrokerConnectionError

T = TypeVar("T")
KeyT = TypeVar("KeyT")

#: Seconds a broker may take to answer before it counts as unreachable.
CONNECT_TIMEOUT_S = 15.0
#: Seconds that the client library may take to report a time-out of its own.
LATE_S = 1.0
#: Seconds between two looks at the client's log.
_POLL_S = 0.02
#: Seconds after which connections that end early count as a wrong protocol.
_ENDS_EARLY_S = 3.0
#: Seconds before a question is repeated that found no leader.
_RETRY_DELAY_S = 0.05


def first_answer(admin: AdminClient, timeout_s: float, ask: Callable[[], T]) -> T:
    """Ask the first question of a client, on a thread of its own, and return the answer.

    Raises `BrokerConnectionError` if no broker answers within `timeout_s` seconds, or at once if all refuse the client.
    """
    servers, words = admin.servers, admin.words
    # The library ignores its own time-outs in places (confluentinc/librdkafka#5456).
    call = BackgroundCall("a first question", ask, timeout_s + LATE_S, LeftBehind("a first question"))
    deadline = time.monotonic() + _ENDS_EARLY_S
    try:
        while (found := call.answer(_POLL_S)) is None:
            admin.poll(0)
            cause = words.cause
            ends_early = cause is not None and cause.may_pass and bool(cause.remedy) and time.monotonic() > deadline
            if ends_early or words.refused_by_all(servers):
                # The library still waits for its whole time: the call is left to its thread.
                raise BrokerConnectionError(f"no Kafka broker lets this client in at {servers}: {cause}")
    except (KafkaException, NotAnsweredError) as error:
        admin.poll(0)
        said = reason(error) if words.cause is None else str(words.cause)
        if words.cause is None or not words.cause.remedy:
            first = "the address, that the broker runs, and its security settings"
            said += f"; check {'that the broker runs' if words.has_worked else first}"
        raise BrokerConnectionError(f"no Kafka broker answered at {servers} within {timeout_s:g} s: {said}") from error
    words.clear()
    return found


def answered(question: Future[T], timeout_s: float) -> T:
    """Return the brokers' answer to a question of an admin client, within `timeout_s` seconds.

    The library may miss its own time-out, for example if its thread gets no processor. This raises a `KafkaException`
    then, too, so that callers have one kind of error to catch.
    """
    try:
        return question.result(timeout_s)
    except TimeoutError:
        error = KafkaError(KafkaError._TIMED_OUT, f"the client did not answer within {timeout_s:g} s")  # noqa: SLF001 - the library's public constants look so
        raise KafkaException(error) from None


def all_answered(
    questions: Mapping[KeyT, Future[T]], timeout_s: float
) -> tuple[dict[KeyT, T], dict[KeyT, KafkaException]]:
    """Return the answers to questions that were sent together, and the error of each unanswered one.

    All share one time limit: `timeout_s`, which the library holds, and `LATE_S` for its report.
    """
    deadline = time.monotonic() + timeout_s + LATE_S
    found, failed = dict[KeyT, T](), dict[KeyT, KafkaException]()
    for key, question in questions.items():
        try:
            found[key] = answered(question, max(0.0, deadline - time.monotonic()))
        except KafkaException as error:
            failed[key] = error
    return found, failed


def asked_until_ready(question: Callable[[], T], limit_s: float) -> T:
    """Repeat a question until brokers are ready, and return the answer: a new partition has no leader at first.

    Raises the last `KafkaException` after `limit_s` seconds, and at once if a permission is missing.
    """

    def may_be_ready_soon(error: BaseException) -> bool:
        return isinstance(error, KafkaException) and not is_missing_right(error)

    return ask_again(question, limit_s, _RETRY_DELAY_S, until=lambda _answer: True, passes=may_be_ready_soon)
