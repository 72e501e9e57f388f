"""Ends of Kafka transactions that are not known: nothing lost, nothing twice, and no end that ends something else."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import ClusterMetadata
from half_partition import half_partition
from transaction_tools import Bench

from kafka_proxy import END_TXN, Fault, KafkaProxy, What
from kafka_tools import read_all
from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.transactional.end_watch import EndWatch, UnknownEndError
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.transactions import Coordinator
from penstock.transactions.coordinator.loop import CoordinatorLoop
from penstock.transactions.coordinator.partitions.counts import Counts
from penstock.transactions.coordinator.partitions.half_partition import HalfPartition
from penstock.transactions.coordinator.publishing.group_gate import GroupGate
from penstock.transactions.coordinator.publishing.publisher import InDoubtError
from penstock.transactions.coordinator.publishing.publisher_slot import PublisherSlot
from penstock.transactions.coordinator.recovery.recovered_partition import DoneRead, RecoveredPartition
from penstock.transactions.coordinator.recovery.recoveries import Recoveries
from penstock.transactions.coordinator.state.pending.batch_limit import BatchLimit
from penstock.transactions.coordinator.state.pending.ready_queue import CommitBatch
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.done_records import Done, Note
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

TOPICS = StoreTopics("penstock", 1)


@dataclass
class DoneLog:
    """A done log of one partition, and what reads and writes it: each record is the notes of one Kafka transaction."""

    records: list[list[Note]] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    doubts: int = 0

    doing: str = ""
    since: float = 0.0

    def open(self) -> None:
        """Nothing has to be made."""

    def close(self) -> None:
        """Nothing is left open."""

    def publish(self, batches: Mapping[int, CommitBatch], _: object, produced: Callable[[], None]) -> None:
        """Commit, and do not know it the first time."""
        produced()
        self.records.append(batches[0].notes())
        self.published += [pending.half.transaction_id for pending in batches[0].decided]
        if not self.doubts:
            self.doubts += 1
            raise InDoubtError("the answer was lost")

    def done(self, partitions: Iterable[int], starts: Mapping[int, int]) -> dict[int, DoneRead]:
        assert list(partitions) == [0]
        found = list(enumerate(self.records))[starts[0] :]
        return {0: DoneRead(len(self.records), [(at, Done(notes, [])) for at, notes in found])}


class Member:
    """The membership of a coordinator that owns one partition, whose logs have nothing new."""

    def __init__(self, owned: HalfPartition, log: DoneLog) -> None:
        self.owned = {0: owned}
        self.recoveries = Recoveries(lambda _partitions, _step: {}, "test", LeftBehind("the coordinator of a test"))
        self.logs = self
        self._log = log

    def serve(self) -> None:
        """Nothing changes."""

    def was_cut_off(self) -> bool:
        return False

    def read(self, timeout_s: float, most: int, *, for_halves: bool, full: bool) -> list[Any]:
        assert timeout_s >= 0
        assert not for_halves
        assert not full
        assert most > 0
        return []

    def group_metadata(self) -> None:
        return None

    def known_end(self, topic: str, partition: int) -> int:
        assert topic
        return partition


#: What the client library calls the end of a log.
LATEST = -1


def answered(result: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class Admin:
    """A broker without topics of users, with the logs of one partition."""

    def __init__(self, log: DoneLog) -> None:
        self._log = log
        #: How often the end of the done log was told.
        self.told = 0

    def list_offsets(self, places: Mapping[TopicPartition, Any], request_timeout: float) -> dict[Any, Future[Any]]:
        assert request_timeout
        is_end = next(iter(places.values()))._value == LATEST
        self.told += is_end
        ends = {TOPICS.done: len(self._log.records), TOPICS.half: 1, TOPICS.op: 1} if is_end else {}
        return {place: answered(SimpleNamespace(offset=ends.get(place.topic, 0))) for place in places}

    def describe_topics(self, topics: Any, request_timeout: float) -> dict[str, Future[Any]]:
        assert request_timeout
        return {name: answered(SimpleNamespace(topic_id=f"id of {name}")) for name in topics.topic_names}

    def list_topics(self, *, timeout: float) -> ClusterMetadata:
        assert timeout
        return ClusterMetadata()

    def delete_records(self, points: list[Any], request_timeout: float) -> dict[Any, Future[Any]]:
        assert request_timeout
        return {point: answered(None) for point in points}


class NoChecks:
    """Nothing is due."""

    def run(self, partition: HalfPartition, now: float) -> None:
        assert partition.number == 0
        assert now


def test_tending_in_the_round_of_a_doubt_does_not_hide_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.partitions.log_upkeep.UPKEEP_S", 0.0)
    log, counts, ration = DoneLog(), Counts(), RationedLog()
    owned = half_partition(RecoveredPartition(0, 0, half_end=1, op_end=1, notes=[], done_end=0), counts, log=ration)
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    owned.state.add_half(0, half)
    owned.state.add_op(0, Op(half.transaction_id, Verdict.ROLLBACK, Author.PRODUCER, "orders", 0, (0,), 0), 0)
    admin = Admin(log)
    left = LeftBehind("a test")
    slot = PublisherSlot(
        lambda _: log,  # type: ignore[arg-type,return-value] # what is used of it
        lambda starts: log.done(starts, starts),
        "test",
        left,
    )
    loop = CoordinatorLoop(
        "servers",
        topics=TOPICS,
        admin=admin,  # type: ignore[arg-type] # what is used of it
        membership=Member(owned, log),  # type: ignore[arg-type] # what is used of it
        slots=[slot],
        trial_slots=[],
        gate=GroupGate(lambda: None, left),
        left=left,
        limit=BatchLimit(0.02),
        checks=NoChecks(),  # type: ignore[arg-type] # nothing is due
        status=lambda _status, _now: None,
        counts=counts,
        ration=ration,
        rights=MissingRights({}),
    )

    def settled() -> bool:
        loop.round()
        return counts.rolled_back > 0 and not slot.is_busy

    wait_until(settled)
    for _ in range(3):
        loop.round()
    loop.close()

    assert (log.doubts, counts.recoveries) == (1, 1)
    assert log.published == [half.transaction_id]
    assert counts.rolled_back == 1
    assert admin.told > 1


@pytest.fixture
def proxy(bench: Bench) -> Iterator[KafkaProxy]:
    """What the coordinator's way to the broker goes through; producers and readers go straight."""
    with KafkaProxy(bench.servers) as made:
        yield made


@pytest.fixture
def coordinator(bench: Bench, proxy: KafkaProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    """A coordinator behind the proxy that settled something already, so that all its connections stand."""
    # No end but those of what is sent: none of positions alone.
    monkeypatch.setattr("penstock.transactions.coordinator.partitions.half_partition._IDLE_S", 600.0)
    made = Coordinator(bootstrap_servers=proxy.bootstrap_servers, prefix=bench.topics.prefix)
    with made:
        send(bench, b"first")
        bench.settled(made, committed=1)
        yield made


def send(bench: Bench, *values: bytes, topic: str | None = None) -> None:
    producer = bench.producer()
    for value in values:
        producer.send(topic or bench.topic, key=b"k", value=value)


def send_until(bench: Bench, coordinator: Coordinator, standing: Fault) -> list[bytes]:
    """Send messages, each in a Kafka transaction of its own, until one's end is held; return what was sent."""
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
    assert epochs(proxy, repeated.producer_id)[-1] > repeated.epoch
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

    assert epochs(proxy, end.producer_id)[-1] > end.epoch
    assert seen(bench) == Counter([b"first", b"a", *sent])


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
