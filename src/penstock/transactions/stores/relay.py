"""The relay (transactional outbox) of one shard: takes the shard over, fences its predecessor, publishes its messages.

A store outside Kafka cannot mark a message as published in the same transaction that publishes it. So each Kafka
transaction also writes the ids of its messages into `done`, a log of the store. A committed transaction is published
unless `done` has its id. This is safe because a new owner fences its predecessor first, in this order:

1. The store confirms that this coordinator owns the shard.
2. The relay opens producers under all transactional ids that a predecessor may use. This ends its open transactions
   and fences it.
3. The last producer that opens reads the done log. It names all that the predecessor published, even if the store does
   not know of it.
4. Only now the relay takes messages from the store. In the same step the store checks that it still owns the shard. The
   producers that publish them are older than this check. So a relay that lost its shard has no usable producer.

If a process dies at any point, the next one starts at 1. The transactional ids belong to the shard, not to its owner.
If the broker cannot free an id, because a target takes no transaction markers, a new id replaces it. The store saves
the new id before its first use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

from confluent_kafka import KafkaException

from penstock.clients.kafka_errors import is_missing_right
from penstock.clients.rights import Operation, topic_right
from penstock.transactions.publishing.engine import Engine
from penstock.transactions.publishing.publisher import InDoubtError, PublishingClients, Visibility
from penstock.transactions.publishing.publisher_slot import PublisherSlot
from penstock.transactions.stores.done_log import DoneLog, DoneRead
from penstock.transactions.stores.shards import ShardBacklog

#: Seconds between two steps while a shard is taken over.
_TAKEOVER_POLL_S = 0.1
#: After a failure, brokers must answer a probe within these seconds before the next try.
_PROBE_BUDGET_S = 2.0
#: The target seconds from the begin of a Kafka transaction until it is visible; its size follows from it.
_TARGET_LATENCY_S = 0.02
#: Seconds between two updates of the stored reasons for waiting.
_EXPLAIN_INTERVAL_S = 1.0


class Relay:
    """Publishes one shard. Used by one thread; no method waits.

    `name` is the prefix of its transactional ids.
    """

    def __init__(self, shard: ShardBacklog, number: int, name: str, clients: PublishingClients) -> None:
        self._shard = shard
        self._number = number
        self._clients = clients
        self._done = DoneLog(clients.bootstrap_servers, clients.config, clients.done_topic, number, clients.rights)
        self._slots = [self._slot(f"{name}.{letter}", is_trial=letter in "xyz") for letter in "abcxyz"]
        # During the take-over: slots for other ids of a predecessor. None before the take-over.
        self._former: list[PublisherSlot] | None = None
        # Opens after all other slots: then all other writers are fenced, and it reads the done log.
        self._last = self._slots[0]
        self._last.ask({number: 0}, sure_s=0.0)
        # The shard by its number, for the engine; empty until the shard is taken over.
        self._owned: dict[int, ShardBacklog] = {}
        self._explained_at = 0.0
        #: Publishes the shard after the take-over. Its transactional ids prove its ownership.
        self.engine = Engine(
            self._owned,
            clients,
            lambda: self._done.bounds(_PROBE_BUDGET_S),
            _TARGET_LATENCY_S,
            slots=self._slots,
        )

    def _slot(self, name: str, *, is_trial: bool) -> PublisherSlot:
        place = self._clients.done_topic, self._number
        return PublisherSlot(
            self._clients,
            name,
            self._read_done,
            is_trial=is_trial,
            may_open=partial(self._may_open, name),
            visibility=lambda: Visibility(self._done.admin, place),
        )

    def _read_done(self, _: Mapping[int, int]) -> Mapping[int, DoneRead]:
        """Read the done log on a slot's thread; after an error the slot tries again."""
        try:
            return {self._number: self._done.read()}
        except TimeoutError as error:
            raise InDoubtError(str(error)) from error
        except KafkaException as error:
            if not is_missing_right(error):
                raise
            right = topic_right(Operation.READ, self._clients.done_topic)
            text = self._clients.rights.refused("the done log cannot be read", right)
            raise InDoubtError(text, rights=[right]) from error

    @property
    def _all_slots(self) -> list[PublisherSlot]:
        return [*self._slots, *(self._former or ())]

    @property
    def _are_others_fenced(self) -> bool:
        """Whether no producer except the last slot's can write.

        A lost id is harmless: the end of its last transaction is already decided.
        """
        return all(slot.is_ready or (slot in (self._former or ()) and slot.lost_ids) for slot in self._all_slots[1:])

    def _may_open(self, name: str) -> bool:
        if name == self._last.name and not self._owned and not self._are_others_fenced:
            return False
        return self._shard.may_open([slot.transactional_id for slot in self._all_slots])

    @property
    def is_lost(self) -> bool:
        """Whether the shard belongs to another coordinator now."""
        return self._shard.is_lost

    @property
    def is_open(self) -> bool:
        """Whether the take-over is complete."""
        return bool(self._owned)

    @property
    def is_ready(self) -> bool:
        """Whether it could publish now."""
        return self.is_open and self.engine.is_ready(time.monotonic())

    def slow_call(self) -> tuple[str, float]:
        """Return the call that has hung longest, and its seconds; an empty name if no call hangs."""
        return max((slot.slow_call() for slot in self._all_slots), key=lambda call: call[1])

    def step(self, *, begins: bool = True) -> bool:
        """Do all steps that need no waiting; return whether something happened.

        Without `begins` it starts nothing new. Raises the store's errors; the next call continues.
        """
        now, engine, shard = time.monotonic(), self.engine, self._shard
        if self._former is None:
            if not begins:
                return False
            own = {slot.transactional_id for slot in self._all_slots}
            self._former = [self._slot(name, is_trial=True) for name in shard.claimed() if name not in own]
        engine.poll(now)
        if not self._owned:
            return self._take_over(self._former, now)
        progressed = engine.take_result()
        shard.flush()
        if begins:
            progressed |= engine.begin(now)
        if now - self._explained_at >= _EXPLAIN_INTERVAL_S:
            self._explained_at = now
            shard.explain()
        shard.flush()
        return progressed

    def _take_over(self, former: Sequence[PublisherSlot], now: float) -> bool:
        # The engine itself opens its slots for trials, when it needs them.
        for slot in self._all_slots:
            if slot.is_trial and not (slot in former and slot.lost_ids):
                slot.poll(now)
        found = self._last.answer()
        if found is None:
            return False
        for slot in former:
            slot.close()
        self._former = []
        self._shard.take_over(found[self._number], self.engine.quarantine, self._clients.discarded)
        self._owned[self._number] = self._shard
        self._shard.flush()
        return True

    def wait_s(self) -> float:
        """Return the seconds until the next `step`, if nothing wakes the thread before."""
        return self.engine.wait_s() if self.is_open else _TAKEOVER_POLL_S

    def trim(self) -> None:
        """Trim the settled part of the done log, if all published messages are durably settled."""
        if self.is_open and self._shard.is_durable():
            self._done.forget(self.engine.floor(self._number))

    def finish(self, limit_s: float) -> None:
        """Let the open Kafka transaction end within `limit_s` and settle it in the store. Nothing new starts."""
        self.engine.close(limit_s)
        self._shard.flush()

    def close(self) -> None:
        """Give the shard up at once: the open Kafka transaction is abandoned; the next owner fences it."""
        self.engine.close(0.0)
        for slot in self._former or ():
            slot.close()
