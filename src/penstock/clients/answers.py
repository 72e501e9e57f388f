"""What brokers answer to a client: waited for within limits that we hold, and no longer than waiting is of use."""

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
#: Seconds that the client library may take to report that a broker did not answer.
LATE_S = 1.0
#: Seconds between two looks at what the client says.
_POLL_S = 0.02
#: Seconds for which an address is tried whose connections end early, which a wrong protocol does.
_ENDS_EARLY_S = 3.0
#: Seconds between two questions of which the first found no leader.
_RETRY_DELAY_S = 0.05


def first_answer(admin: AdminClient, timeout_s: float, ask: Callable[[], T]) -> T:
    """Return what the first question of a client gives, asked on a thread of its own by `ask` for `timeout_s` seconds.

    `BrokerConnectionError` where no broker answered in time; or at once, where none will let this client in.
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
                # The library waits for its whole time all the same: the call ends with its thread.
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
    """Return what brokers answered to a question of an admin client, waiting `timeout_s` seconds at most.

    The library's own time-out may pass unheard, as where a thread of it gets no processor: then a `KafkaException` says
    so, so that nobody has two kinds to catch.
    """
    try:
        return question.result(timeout_s)
    except TimeoutError:
        error = KafkaError(KafkaError._TIMED_OUT, f"the client did not answer within {timeout_s:g} s")  # noqa: SLF001 - the library's public constants look so
        raise KafkaException(error) from None


def all_answered(
    questions: Mapping[KeyT, Future[T]], timeout_s: float
) -> tuple[dict[KeyT, T], dict[KeyT, KafkaException]]:
    """Return what brokers answered to questions that were sent together, and the error of each that has no answer.

    They have one time limit, which we hold: the library may answer `LATE_S` after its own of `timeout_s` seconds.
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
    """Return what a question gives, asked again while brokers are not ready: a new partition has no leader yet.

    Raises the last `KafkaException` once `limit_s` seconds have passed, and that of a missing right at once.
    """

    def may_be_ready_soon(error: BaseException) -> bool:
        return isinstance(error, KafkaException) and not is_missing_right(error)

    return ask_again(question, limit_s, _RETRY_DELAY_S, until=lambda _answer: True, passes=may_be_ready_soon)
