"""Ends of Kafka transactions that are not known: nothing lost, nothing twice, and no end that ends something else."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from transaction_tools import Bench

from kafka_proxy import END_TXN, Fault, KafkaProxy, What
from kafka_tools import read_all
from penstock.clients.transactional.end_watch import EndWatch, UnknownEndError
from penstock.transactions import Coordinator
from waiting import wait_until


@pytest.fixture
def coordinator(bench: Bench, proxy: KafkaProxy, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    """A coordinator behind the proxy that settled something already, so that all its connections stand."""
    # No end but those of what is sent: none of positions alone.
    monkeypatch.setattr("penstock.transactions.stores.kafka.coordinator.half_partition._IDLE_COMMIT_AFTER_S", 600.0)
    made = bench.coordinator(bootstrap_servers=proxy.bootstrap_servers)
    send(bench, b"first")
    bench.settled(made, committed=1)
    return made


def send(bench: Bench, *values: bytes, topic: str | None = None) -> None:
    producer = bench.producer()
    for value in values:
        producer.send(topic or bench.topic, key=b"k", value=value)


def send_until(bench: Bench, coordinator: Coordinator, standing: Fault) -> list[bytes]:
    """Send messages, each in its own Kafka transaction, until the end of one is held; return the sent messages."""
    sent: list[bytes] = []
    while not standing.fired:
        sent.append(b"%d" % len(sent))
        before = coordinator.statistics().committed
        send(bench, sent[-1])
        wait_until(lambda: standing.fired or coordinator.statistics().committed > before)  # noqa: B023 - waited for here
    return sent


def seen(bench: Bench) -> Counter[bytes | None]:
    return Counter(value for _, value in bench.visible())


def committed_now(bench: Bench) -> set[bytes | None]:
    """Return what readers of committed records see while a transaction is open."""
    return {message.value() for message in read_all(bench.servers, bench.topic, left_open=True)}


def epochs(proxy: KafkaProxy, producer_id: int) -> list[int]:
    """Return the epochs a producer was given, in their order."""
    return [identity.epoch for identity in proxy.identities if identity.producer_id == producer_id]


@pytest.mark.parametrize("what", [What.CUT_AFTER, What.CUT_BEFORE])
def test_an_end_whose_answer_is_lost_is_settled_from_the_done_log(
    bench: Bench, proxy: KafkaProxy, coordinator: Coordinator, what: What
) -> None:
    before = coordinator.statistics().recoveries

    with proxy.fault(END_TXN, what):
        send(bench, b"a", b"b")
        statistics = bench.settled(coordinator, committed=3)

    assert statistics.recoveries > before
    assert seen(bench) == Counter([b"a", b"b", b"first"])


def test_an_end_that_the_library_retried_counts_as_in_doubt(
    bench: Bench, proxy: KafkaProxy, coordinator: Coordinator
) -> None:
    before, known = coordinator.statistics().recoveries, len(proxy.ends)

    with proxy.fault(END_TXN, What.CUT_AFTER) as cut:
        send(bench, b"a")
        bench.counted(coordinator, committed=2, recoveries=before + 1)

    # The library repeated it as one and the same producer. It is one that no end is sent by any more.
    repeated = cut.end
    assert repeated is not None
    assert proxy.ends[known:].count(repeated) > 1
    known = len(proxy.ends)
    send(bench, b"b", b"c", b"d")
    bench.settled(coordinator, committed=5)
    wait_until(lambda: epochs(proxy, repeated.producer_id)[-1] > repeated.epoch)
    # By its next epoch, or by the other producer, which may be at the same number.
    senders = {(end.producer_id, end.epoch) for end in proxy.ends[known:]}
    assert senders
    assert (repeated.producer_id, repeated.epoch) not in senders


def test_an_end_held_past_the_next_begin_ends_nothing_else_and_a_new_epoch_is_seen(
    bench: Bench, proxy: KafkaProxy, coordinator: Coordinator
) -> None:
    before = coordinator.statistics().recoveries

    with proxy.fault(END_TXN, What.HOLD_AND_CUT) as late:
        send(bench, b"a")
        bench.counted(coordinator, committed=2, recoveries=before + 1)
        end = proxy.ends[-1]
        with proxy.fault(END_TXN, What.HOLD, producer_id=end.producer_id) as standing:
            # The same producer stands with all of a transaction written and its end on the way ...
            sent = send_until(bench, coordinator, standing)
            visible = committed_now(bench)
            # ... and now the late end arrives.
            proxy.let_go(late)
            assert committed_now(bench) == visible
            assert sent[-1] not in visible
    bench.settled(coordinator, committed=2 + len(sent))

    wait_until(lambda: epochs(proxy, end.producer_id)[-1] > end.epoch)
    assert seen(bench) == Counter([b"first", b"a", *sent])


@pytest.mark.thorough
def test_a_transaction_that_failed_is_ended_by_a_new_epoch_and_no_end_of_it_can_come_late(
    bench: Bench, proxy: KafkaProxy, coordinator: Coordinator, new_topic: Callable[..., str]
) -> None:
    narrow = new_topic(config={"max.message.bytes": "1000"})

    send(bench, bytes(5_000), topic=narrow)
    bench.counted(coordinator, held=1)
    send(bench, b"a", b"b")
    bench.counted(coordinator, committed=3)

    assert all(end.committed for end in proxy.ends), "an abort that is on its way could end another transaction"
    assert seen(bench) == Counter([b"first", b"a", b"b"])


def test_a_silent_client_library_is_believed_only_where_the_end_was_quick() -> None:
    watch = EndWatch(logging.getLogger("penstock.kafka"), debugging=False)

    watch.begin()
    assert watch.doubt(0.01) is None
    assert watch.doubt(1.0) is not None
    watch.log(logging.DEBUG, "%s [%s] %s", "ENDTXN", "a", "EndTxn returned NO_ERROR in state CommittingTransaction")
    assert watch.doubt(1.0) is None
    watch.log(logging.DEBUG, "%s [%s] %s", "ENDTXN", "a", "EndTxn returned _TRANSPORT in state CommittingTransaction")
    watch.log(logging.DEBUG, "%s [%s] %s", "ENDTXN", "a", "EndTxn returned NO_ERROR in state CommittingTransaction")
    assert watch.doubt(0.01) is not None
    watch.begin()
    assert watch.doubt(0.01) is None


class Ending:
    """A client whose end of a transaction takes no time, and fails or not; its log is served with a poll."""

    def __init__(self, watch: EndWatch, error: KafkaError | None = None, said: str = "", lost: bool = False) -> None:
        self._watch, self._error, self._said, self._lost = watch, error, said, lost

    def commit_transaction(self, timeout: float) -> None:
        assert timeout == 10.0
        if self._error is not None:
            raise KafkaException(self._error)

    abort_transaction = commit_transaction

    def poll(self, timeout: float) -> int:
        assert timeout == 0
        if self._said:
            self._watch.log(logging.DEBUG, "%s [%s] %s", "ENDTXN", "a", f"EndTxn returned {self._said}")
        if self._lost:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        return 0


_ABORT = {"txn_requires_abort": True}
INVALID_STATE = KafkaError(KafkaError.INVALID_TXN_STATE, "", **_ABORT)


@pytest.mark.parametrize(
    ("error", "said", "lost", "commit", "abort"),
    [
        (None, "NO_ERROR in state", False, None, None),
        (None, "", False, None, None),
        # Answered well, and sent twice.
        (None, "_TRANSPORT in state", False, UnknownEndError, UnknownEndError),
        (None, "", True, UnknownEndError, UnknownEndError),
        # Refused by the broker, or not sent; and what is neither.
        (KafkaError(KafkaError.CONCURRENT_TRANSACTIONS, "", **_ABORT), "", False, KafkaException, UnknownEndError),
        # The broker knows of no open transaction: there is nothing to abort, unless an end was sent more than once.
        (INVALID_STATE, "INVALID_TXN_STATE (", False, KafkaException, None),
        (INVALID_STATE, "INVALID_TXN_STATE (", True, KafkaException, None),
        (INVALID_STATE, "_TRANSPORT in state", False, KafkaException, UnknownEndError),
        (KafkaError(KafkaError._TIMED_OUT, "", retriable=True, **_ABORT), "", False, UnknownEndError, UnknownEndError),
        (KafkaError(KafkaError._TIMED_OUT), "", False, UnknownEndError, UnknownEndError),
        (KafkaError(KafkaError._FENCED, "", fatal=True), "", False, UnknownEndError, UnknownEndError),
    ],
)
def test_an_end_is_known_where_it_was_answered_once_or_never_sent(
    error: KafkaError | None, said: str, lost: bool, commit: type[Exception] | None, abort: type[Exception] | None
) -> None:
    watch = EndWatch(logging.getLogger("penstock.kafka"), debugging=False)
    producer: Any = Ending(watch, error, said, lost)

    for end, expected in ((watch.commit, commit), (watch.abort, abort)):
        watch.begin()
        if expected is None:
            end(producer, 10.0)
        else:
            with pytest.raises(expected):
                end(producer, 10.0)


def test_the_watch_passes_on_what_the_user_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("penstock.kafka")
    caplog.set_level(logging.DEBUG)
    for debugging in (False, True):
        watch = EndWatch(log, debugging=debugging)
        watch.log(logging.DEBUG, "%s [%s] %s", "TXNAPI", "a", f"debug {debugging}")
        watch.log(logging.WARNING, "%s [%s] %s", "FAIL", "a", f"warning {debugging}")

    said = [record.getMessage() for record in caplog.records]
    assert said == ["FAIL [a] warning False", "TXNAPI [a] debug True", "FAIL [a] warning True"]
