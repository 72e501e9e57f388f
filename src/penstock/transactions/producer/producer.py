"""The transactional producer: it stores a half before the local transaction, and a decision after it.

The end of the `with` block decides::

    with producer.transaction("orders", key=b"42", value=b"...") as tx:   # the half is durable here
        db.insert_order(...)                                              # the local transaction
    # normal end: COMMIT; exception: ROLLBACK; after tx.unknown(): a check decides

This file has the options, start and stop; `sender.py` has the ways to send.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from penstock.errors import ConfigurationError
from penstock.option_list import refusing_removed
from penstock.options import ClientConfig, a_plain_function, a_telemetry, not_empty, one_of, positive_int, seconds
from penstock.outgoing import encoded
from penstock.transactions.model import Order, ProducerStatistics, Wait
from penstock.transactions.producer.check_responder import CHECK_TIMEOUT_S, Check, CheckResponder
from penstock.transactions.producer.in_flight import Core
from penstock.transactions.producer.sender import WAITS, TransactionSender
from penstock.transactions.producer.transaction import TransactionListener
from penstock.transactions.store import Store
from penstock.transactions.stores.kafka.store import KafkaStore
from penstock.transactions.wire.half import MAX_GROUP_BYTES
from penstock.transactions.wire.ids import is_id
from penstock.transactions.wire.topics import DEFAULT_PARTITIONS

if TYPE_CHECKING:
    from penstock.telemetry import Telemetry
    from penstock.telemetry.sending import SendSpans


class TransactionalProducer(TransactionSender):
    """Sends messages that become visible only if a local transaction commits.

    Thread-safe: any number of threads may have transactions in flight, and one thread or event loop thousands of them.
    It connects at the first use, or at `start`. A process that has to answer checks before it sends must call `start`,
    or use the producer as a context manager, with `with` or `async with`.

    Args:
        group: name of the producer group, 1 to 200 bytes. Any live producer of the group may have to check a
            transaction, so all of them must see the same data.
        bootstrap_servers: Kafka's addresses.
        check: returns the outcome of an undecided local transaction; runs on threads of its own. Without a check this
            producer answers none; only other producers of the group can.
        listener: a local transaction and its check in one object, instead of `check`: see `send_in_transaction`.
        prefix: the prefix of the store's topic names; the coordinator must have the same.
        partitions: partitions of half, op and done, if they have to be created.
        config: settings of the Kafka clients, by librdkafka's names.
        check_workers: threads that run checks.
        check_timeout: seconds that a check may take. A check that takes longer is given up and its thread replaced; its
            answer still counts if it comes.
        send_timeout: seconds after which an unacknowledged half or decision counts as not stored, and for which a
            send waits for room.
        order: "commit": messages of one key are published in the order of their decisions; "half": in the order in
            which their halves were stored, so that an undecided half holds later ones of its key in this group.
        wait: what a send waits for, unless the call says otherwise. "sent": the decision is handed to the client; its
            result is logged and counted, and a check settles a lost one. "stored": the decision is durable.
            "published": a committed reader can see the message.
        max_in_flight: transactions that may be in flight at once.
        max_in_flight_bytes: bytes of their keys and values.
        when_full: "block": a send waits for room, at most `send_timeout`; "raise": it raises `BufferFullError`.
        publish_timeout: seconds that `wait="published"` waits at most, from the stored decision on.
        telemetry: makes OpenTelemetry spans `send {topic}`, so that consumers' spans link to the sending code. None
            (default) makes none, at no cost.
        store: a store other than Kafka's topics. It has its own `bootstrap_servers`, `prefix`, `partitions` and
            `config`; they are refused here.

    Raises:
        ConfigurationError: an argument is wrong. Nothing was started.
    """

    @refusing_removed
    def __init__(
        self,
        group: str,
        *,
        bootstrap_servers: str | None = None,
        check: Check | None = None,
        listener: TransactionListener | None = None,
        prefix: str = "penstock",
        partitions: int = DEFAULT_PARTITIONS,
        config: ClientConfig | None = None,
        check_workers: int = 4,
        check_timeout: float = CHECK_TIMEOUT_S,
        send_timeout: float = 15.0,
        order: Order = "commit",
        wait: Wait = "stored",
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 256 << 20,
        when_full: Literal["block", "raise"] = "block",
        publish_timeout: float = 30.0,
        telemetry: Telemetry | None = None,
        store: Store | None = None,
    ) -> None:
        not_empty("group", group)
        if len(encoded("group", group) or b"") > MAX_GROUP_BYTES:
            raise ConfigurationError(f"group must have at most {MAX_GROUP_BYTES} bytes, but has {len(group)}")
        if listener is not None:
            if check is not None:
                raise ConfigurationError("give check or listener, not both: a transaction has one check")
            check = listener.check_local_transaction
        if check is not None:
            a_plain_function("check", check)
        positive_int("partitions", partitions)
        positive_int("check_workers", check_workers)
        seconds("check_timeout", check_timeout)
        within = getattr(type(check), "within", None)
        if check is not None and within is not None:
            # A `BarrierCheck` has to know its limit. Its class has the method; a mock or a proxy has any attribute.
            check = within(check, check_timeout)
        a_telemetry(telemetry)
        seconds("send_timeout", send_timeout)
        positive_int("max_in_flight", max_in_flight)
        positive_int("max_in_flight_bytes", max_in_flight_bytes)
        seconds("publish_timeout", publish_timeout)
        one_of("order", order, "commit", "half")
        one_of("wait", wait, *WAITS)
        one_of("when_full", when_full, "block", "raise")
        if (store is None) == (bootstrap_servers is None):
            raise ConfigurationError("give either bootstrap_servers or a store, exactly one of them")
        if store is not None and (prefix != "penstock" or partitions != DEFAULT_PARTITIONS or config):
            raise ConfigurationError(
                "prefix, partitions and config are the store's own: give them to it, not to the producer"
            )
        store_in_use = store or KafkaStore(
            bootstrap_servers or "",
            prefix=prefix,
            partitions=partitions,
            config=config or {},
            send_timeout_s=send_timeout,
            name=group,
            in_flight=lambda: self._core.count,
        )
        core = Core(
            store_in_use,
            group,
            max_count=max_in_flight,
            max_bytes=max_in_flight_bytes,
            room_timeout_s=send_timeout if when_full == "block" else 0.0,
            answer_timeout_s=math.inf if store is None else send_timeout,
            publish_timeout_s=publish_timeout,
            checks=CheckResponder(store_in_use, group, check, check_workers, check_timeout)
            if check is not None
            else None,
            spans=_spans_of(telemetry, group),
        )
        super().__init__(core, listener=listener, wait=wait, by_half=order == "half")

    def start(self) -> Self:
        """Connect, create absent topics of the store, and begin to answer checks. May be repeated.

        Raises:
            BrokerConnectionError: no broker answered within 15 s.
            StoppedError: the producer was stopped before.
        """
        self._core.start()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Stop answering checks, then wait for messages that were sent or submitted; `timeout` seconds for each step.

        Sends from now on are refused. A message whose answer does not come in time ends with an error. A transaction
        whose block is open in another thread is left to a check. May be repeated, also by other threads: they wait for
        the first call. In a callback of a future it returns at once and another thread does the rest, because the
        callback holds up the messages to wait for.
        """
        self._core.stop(max(0.0, timeout))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def cancel(self, transaction_id: str, *, timeout: float = 30.0) -> None:
        """Take a committed message back that waits for its `deliver_at`: after this returns it is never published.

        Any producer of the group may do this; cancelling twice is allowed. In a store in Kafka it reads all pending
        transactions, because there is no index of ids, and then waits for a coordinator. An operator does the same with
        `penstock tx rollback ID`. From an event loop: `await asyncio.to_thread(producer.cancel, ...)`.

        Args:
            transaction_id: the id of the transaction.
            timeout: seconds to wait for the effect, in a store in Kafka.

        Raises:
            TransactionRefusedError: too late: the message is due or published; or it is not committed.
            TransactionError: the group has no such transaction: it was settled long ago, or never existed.
            DecisionNotStoredError: it is not known whether the cancellation took effect; call it again.
            BrokerConnectionError: the store cannot be reached.
            ConfigurationError: `transaction_id` is no transaction's id.
            StoppedError: the producer was stopped.
        """
        if not isinstance(transaction_id, str) or not is_id(transaction_id):
            raise ConfigurationError("transaction_id is no transaction's id: give the one that the send returned")
        seconds("timeout", timeout)
        self.start()
        self._core.store.cancel(transaction_id, self._core.group, timeout)

    def statistics(self) -> ProducerStatistics:
        """Return counts since the start. Safe from any thread."""
        return self._core.statistics()


def _spans_of(telemetry: Telemetry | None, group: str) -> SendSpans | None:
    if telemetry is None:
        return None
    from penstock.telemetry.sending import SendSpans

    return SendSpans(telemetry, group)
