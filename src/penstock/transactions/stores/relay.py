"""The relay of one shard of a store outside Kafka: takes it over, and publishes it by an engine of its own.

Such a store cannot put "published" and the messages into one transaction. So each Kafka transaction has, besides the
messages, the ids of what it publishes, in a log of the store's own: `done`. What the store still holds as committed is
published unless `done` has it; and nobody else can be writing there, for whoever takes a shard over shuts its
predecessor out first. This order makes that hold:

1. The store says that the shard is this coordinator's.
2. Producers are opened under all transactional ids that a predecessor may publish under: whatever it had open is ended,
   and it is shut out.
3. The last of them that opens reads the done log. What a predecessor published, and the store may not know of, is
   marked there.
4. Only now is anything taken from the store, which makes sure in the same step that it still owns the shard; and it is
   published by a producer that was made before that. So who lost the shard has nothing to publish with.

A process that dies anywhere leaves the next one at 1. The ids are those of the shard, whoever owns it, and no other's.
Where the broker cannot free one, since a target takes no markers, another takes its place, which the store has written
down before it is used.
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

#: Seconds between two looks while a shard is taken over.
_TAKEOVER_POLL_S = 0.1
#: Seconds in which brokers shall have answered, after a failure, before anything is tried again.
_PROBE_BUDGET_S = 2.0
#: Seconds from the begin of a group until it is visible, for which groups are made as large as they can be.
_TARGET_LATENCY_S = 0.02
#: Seconds between two looks whether the store knows why things wait.
_EXPLAIN_INTERVAL_S = 1.0


class Relay:
    """Publishes one shard. Used by one thread, which it never holds.

    `name` is what its transactional ids begin with.
    """

    def __init__(self, shard: ShardBacklog, number: int, name: str, clients: PublishingClients) -> None:
        self._shard = shard
        self._number = number
        self._clients = clients
        self._done = DoneLog(clients.bootstrap_servers, clients.config, clients.done_topic, number, clients.rights)
        self._slots = [self._slot(f"{name}.{letter}", is_trial=letter in "xyz") for letter in "abcxyz"]
        # Taking over: slots with the other ids that a predecessor may have; None: it has not begun.
        self._former: list[PublisherSlot] | None = None
        # It opens when all the others have: then nobody else can be writing, and it reads the done log.
        self._last = self._slots[0]
        self._last.ask({number: 0}, sure_s=0.0)
        # The shard by its number, for the engine; none before it was taken over.
        self._owned: dict[int, ShardBacklog] = {}
        self._explained_at = 0.0

        def ask() -> None:
            self._done.bounds(_PROBE_BUDGET_S)

        #: What publishes it, once it was taken over. Its transactional ids prove that it may.
        self.engine = Engine(self._owned, clients, ask, _TARGET_LATENCY_S, slots=self._slots)

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
        """Read the done log, on a slot's thread; the slot tries again where that fails."""
        try:
            return {self._number: self._done.read()}
        except TimeoutError as error:
            raise InDoubtError(str(error)) from error
        except KafkaException as error:
            if not is_missing_right(error):
                raise
            right = topic_right(Operation.READ, self._clients.done_topic)
            text = self._clients.rights.refused("it cannot be read what was published", right)
            raise InDoubtError(text, rights=[right]) from error

    @property
    def _all_slots(self) -> list[PublisherSlot]:
        return [*self._slots, *(self._former or ())]

    @property
    def _shut_out(self) -> bool:
        """Whether nobody but the last slot may be writing.

        An id that is lost is of no use to anybody: how its last transaction ends is decided.
        """
        return all(slot.is_ready or (slot in (self._former or ()) and slot.lost_ids) for slot in self._all_slots[1:])

    def _may_open(self, name: str) -> bool:
        if name == self._last.name and not self._owned and not self._shut_out:
            return False
        return self._shard.may_open([slot.transactional_id for slot in self._all_slots])

    @property
    def is_lost(self) -> bool:
        """Whether the shard is another's by now."""
        return self._shard.is_lost

    @property
    def is_open(self) -> bool:
        """Whether the shard was taken over."""
        return bool(self._owned)

    @property
    def is_ready(self) -> bool:
        """Whether something could be published now."""
        return self.is_open and self.engine.is_ready(time.monotonic())

    def slow_call(self) -> tuple[str, float]:
        """Return the call that has not gone on for longest, and for how many seconds; an empty name: all do."""
        return max((slot.slow_call() for slot in self._all_slots), key=lambda call: call[1])

    def step(self, *, takes: bool = True) -> bool:
        """Go on as far as that goes without waiting, with something new only if it `takes`; tell whether it went on.

        Raises as the store does; it goes on with the next call.
        """
        now, engine, shard = time.monotonic(), self.engine, self._shard
        if self._former is None:
            if not takes:
                return False
            own = {slot.transactional_id for slot in self._all_slots}
            self._former = [self._slot(name, is_trial=True) for name in shard.claimed() if name not in own]
        engine.poll(now)
        if not self._owned:
            return self._take_over(self._former, now)
        went_on = engine.take_result()
        shard.flush()
        if takes:
            went_on |= engine.begin(now)
        if now - self._explained_at >= _EXPLAIN_INTERVAL_S:
            self._explained_at = now
            shard.explain()
        shard.flush()
        return went_on

    def _take_over(self, former: Sequence[PublisherSlot], now: float) -> bool:
        # The engine opens those for trials when they are needed.
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
        """Return the seconds after which `step` has something to do, if nothing wakes it before."""
        return self.engine.wait_s() if self.is_open else _TAKEOVER_POLL_S

    def trim(self) -> None:
        """Trim the done log as far as all in it is settled. All that was handed over as published is durably so."""
        if self.is_open and self._shard.is_flushed:
            self._done.forget(self.engine.floor(self._number))

    def finish(self, limit_s: float) -> None:
        """Let what is under way end, for so many seconds, and have the store know of it; nothing begins any more."""
        self.engine.close(limit_s)
        self._shard.flush()

    def close(self) -> None:
        """Give the shard up at once: what is under way is abandoned, and its next owner shuts it out."""
        self.engine.close(0.0)
        for slot in self._former or ():
            slot.close()
