"""What brokers answer to a client: waited for within limits that we hold, and no longer than waiting is of use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from penstock.clients.bounded_calls import Disposable, LeftBehind, ask_again
from penstock.clients.client_log import ClientWords
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.errors import BrokerConnectionError

T = TypeVar("T")
KeyT = TypeVar("KeyT")
AnswerT = TypeVar("AnswerT")

#: Seconds a broker may take to answer before it counts as unreachable.
CONNECT_TIMEOUT_S = 15.0
#: Seconds that the client library may take to report that a broker did not answer.
LATE_S = 1.0
#: Seconds between two looks at what the client says.
_POLL_S = 0.02
#: Seconds for which an address is tried whose connections end early, which a wrong protocol does.
_ENDS_EARLY_S = 3.0
#: Seconds between two questions of which the first found no leader.
_RETRY_DELAY_S = 0.1


def first_answer(admin: AdminClient, bootstrap_servers: str, timeout_s: float, ask: Callable[[], T]) -> T:
    """Return what the first question of a client gives, asked on a thread of its own by `ask` for `timeout_s` seconds.

    `BrokerConnectionError` where no broker answered in time; or at once, where none will let this client in.
    """
    words: ClientWords = getattr(admin, "words", None) or ClientWords({}, None)
    thread = Disposable("penstock-ask", LeftBehind("a first question"))
    answer = thread.start("a first question", ask)
    # It ends with its call: the library waits for its whole time, whatever it has said meanwhile.
    thread.close()
    while not answer.done(_POLL_S):
        admin.poll(0)
        if answer.age_s > timeout_s + LATE_S:
            # The library ignores its own time-outs in places (confluentinc/librdkafka#5456).
            said = "" if words.cause is None else f": {words.cause}"
            raise BrokerConnectionError(
                f"no Kafka broker answered at {bootstrap_servers} within {timeout_s:g} s{said}; the call of the client "
                "library did not return and is abandoned"
            )
        ended_early = words.cause is not None and words.cause.may_pass and bool(words.cause.remedy)
        hopeless = ended_early and answer.age_s > _ENDS_EARLY_S
        if not answer.done() and (hopeless or words.refused_by_all(bootstrap_servers)):
            raise BrokerConnectionError(f"no Kafka broker lets this client in at {bootstrap_servers}: {words.cause}")
    try:
        found = answer.result()
    except KafkaException as error:
        admin.poll(0)
        said = reason(error) if words.cause is None else str(words.cause)
        if words.cause is None or not words.cause.remedy:
            first = "the address, that the broker runs, and its security settings"
            said += f"; check {'that the broker runs' if words.has_worked else first}"
        raise BrokerConnectionError(
            f"no Kafka broker answered at {bootstrap_servers} within {timeout_s:g} s: {said}"
        ) from error
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


class Asked(Generic[KeyT, T, AnswerT]):
    """Requests of an admin client, one for each key, that were sent together and have one time limit, which we hold.

    The library may answer them `LATE_S` after its own limit of `timeout_s` seconds. `read` makes the answer from what
    was found, and from the error of each key that has none.
    """

    def __init__(
        self,
        admin: AdminClient,
        requests: Mapping[KeyT, Future[T]],
        timeout_s: float,
        read: Callable[[dict[KeyT, T], dict[KeyT, KafkaException]], AnswerT],
    ) -> None:
        # It lives until it has answered.
        self._admin = admin
        self._requests = requests
        self._deadline = time.monotonic() + timeout_s + LATE_S
        self._read = read

    @property
    def is_over(self) -> bool:
        """Whether all are answered, or their time is over: `wait` returns at once then."""
        return time.monotonic() >= self._deadline or all(request.done() for request in self._requests.values())

    def answer(self) -> AnswerT | None:
        """Return what was answered; None as long as it is not complete and its time is not over."""
        return self.wait() if self.is_over else None

    def wait(self) -> AnswerT:
        """Return what was answered, waiting for it until the time is over."""
        found, failed = dict[KeyT, T](), dict[KeyT, KafkaException]()
        for key, request in self._requests.items():
            try:
                found[key] = answered(request, max(0.0, self._deadline - time.monotonic()))
            except KafkaException as error:
                failed[key] = error
        return self._read(found, failed)


def asked_until_ready(question: Callable[[], T], limit_s: float) -> T:
    """Return what a question gives, asked again while brokers are not ready: a new partition has no leader yet.

    Raises the last `KafkaException` once `limit_s` seconds have passed, and that of a missing right at once.
    """
    return ask_again(question, limit_s, _RETRY_DELAY_S, until=lambda _answer: True, passes=_may_be_ready_soon)


def _may_be_ready_soon(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and not is_missing_right(error)
