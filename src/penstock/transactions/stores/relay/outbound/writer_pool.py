"""The transactional ids that stand for one: whoever opens takes all that may be in use, and so shuts all others out.

A writer whose transaction failed is not used again, and an id cannot be had while a target takes not even the markers
that end its last transaction: nobody can. So there are several, each with a writer that is ready, and where one is lost
another takes its place, under an id with the next number: `<name>.4`, `<name>.5` and so on.

A successor has to know them all. So their numbers are written into the done log, under an id that has to do with no
target and so cannot be lost to one: the claim, `<name>.ids`. This order makes sure that nobody is left out:

1. Who opens takes the claim first. Nothing that a predecessor writes under it is committed from then on.
2. It reads which numbers were written down, takes these ids, and only then reads what was published.
3. Who adds ids has opened their writers before it writes their numbers down, and uses them only once that is committed.
   Then it had the claim until that moment, and whoever takes it later reads the numbers and takes these ids, too.

The pool of what is tried apart has no claim: its ids are three for good, and all are opened again where none is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from confluent_kafka import KafkaException, Message

from penstock.clients.kafka_errors import reason
from penstock.clients.rights import Right
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.errors import IdLostError, NotOpenedError
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.pace import Pace
from penstock.clients.transactional.producer_settings import DELIVERY_S
from penstock.clients.transactional.writer import PublicationSpans, TransactionalWriter
from penstock.options import ClientConfig
from penstock.transactions.stores.relay.outbound.done_log import DoneLog, encode_numbers

_log = logging.getLogger("penstock.transactions")

#: Seconds for a transactional id whose last transaction may wait for its markers, and for one that brokers do not give.
_ID_TIMEOUT_S = 2.0
_OPEN_TIMEOUT_S = 5.0
#: Transactional ids that stand for one, and their numbers where none were written down.
_IDS = 3
_FIRST = range(1, _IDS + 1)


class WriterPool:
    """Makes the writers of one shard, and keeps them. Used by one thread at a time.

    Its other arguments are those of `TransactionalWriter`. `name` is what its ids begin with; what is tried `apart` has
    no claim.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        *,
        name: str,
        done: DoneLog,
        ids_right: Right,
        rights: MissingRights,
        apart: bool,
        step: Callable[[str], object],
        pace: Pace | None = None,
        spans: PublicationSpans | None = None,
    ) -> None:
        self._name = name
        self._done = done
        self._has_claim = not apart
        self._step = step
        self._make = partial(
            TransactionalWriter,
            bootstrap_servers,
            config,
            log_topic=done.topic,
            ids_right=ids_right,
            rights=rights,
            apart=apart,
            reports_all=True,
            step=step,
            pace=pace,
        )
        self._spans = spans
        self._claim: TransactionalWriter | None = None
        # Those that are ready, each with its number; the first is in use, with the others nothing was sent.
        self._writers: list[tuple[int, TransactionalWriter]] = []
        # What may be in use, as it stands in the done log, and at which offset.
        self._numbers = _FIRST
        self._written_at: int | None = None

    def has_writer(self) -> bool:
        """Whether there is one to publish with."""
        return bool(self._writers)

    @property
    def writer(self) -> TransactionalWriter:
        """The one in use."""
        return self._writers[0][1]

    def shut_out(self, name: str) -> None:
        """Shut out whoever has one of the ids that stand for another name, which has no claim.

        An id that is lost is of no use to anybody. Raises `NotOpenedError` where the broker did not answer in time.
        """
        _close_all(self._take(name, _FIRST))

    def open(self) -> None:
        """Shut out whoever has one of the ids, and take them; what was published can be read then.

        Raises `NotOpenedError` where the broker did not answer in time, or none can be had, and `KafkaException` and
        `TimeoutError` where the done log did not say which ids there are.
        """
        self.close()
        if self._has_claim:
            try:
                self._claim = self._opened(f"{self._name}.ids")
            except IdLostError as error:
                # No target can keep it: the done log itself takes no markers now.
                raise NotOpenedError(str(error)) from error
            announced = self._done.announced(lambda: self._step("reading the done log"))
            if announced is not None:
                self._numbers, self._written_at = announced
        self._writers = self._take(self._name, self._numbers)
        if not self._writers and not self._has_claim:
            raise NotOpenedError(
                f"{self._name} cannot open: the last transactions of all its ids wait for their markers"
            )

    def _take(self, name: str, numbers: Iterable[int]) -> list[tuple[int, TransactionalWriter]]:
        made: list[tuple[int, TransactionalWriter]] = []
        try:
            for number in numbers:
                try:
                    made.append((number, self._opened(name if number == 1 else f"{name}.{number}")))
                except IdLostError as error:
                    _log.warning("%s", error)
        except BaseException:
            _close_all(made)
            raise
        return made

    def _opened(self, transactional_id: str) -> TransactionalWriter:
        writer = self._make(transactional_id, spans=self._spans)
        try:
            writer.open(_OPEN_TIMEOUT_S, _ID_TIMEOUT_S)
        except BaseException:
            writer.close()
            raise
        return writer

    def drop(self) -> None:
        """Give the writer in use up: its transaction failed."""
        self._writers.pop(0)[1].close()

    def refill(self) -> None:
        """Have as many writers as there should be, where there is a claim. Those that are ready are left as they are.

        Raises `NotOpenedError` where the broker did not answer in time: try again; and `KafkaException`,
        `UnknownEndError` where the numbers could not be written down: somebody else may have the claim.
        """
        missing = _IDS - len(self._writers)
        if self._claim is None or missing <= 0:
            return
        behind = self._numbers.stop
        new = self._take(self._name, range(behind, behind + missing))
        try:
            first = min((number for number, _ in (*self._writers, *new)), default=behind)
            self._announce(self._claim, range(first, behind + missing))
        except BaseException:
            _close_all(new)
            raise
        self._writers += new

    def keep_announced(self, offset: int) -> None:
        """Make sure that the numbers stand in the done log when all below an offset is deleted. Raises as `refill`."""
        if self._claim is not None and self._written_at is not None and self._written_at < offset:
            self._announce(self._claim, self._numbers)

    def _announce(self, claim: TransactionalWriter, numbers: range) -> None:
        written: list[Message] = []
        try:
            claim.begin()
            claim.produce_log(self._done.partition, encode_numbers(numbers), written.append)
            if not claim.deliver(DELIVERY_S):
                raise UnknownEndError(f"the ids of {self._name} could not be written down: {claim.blame.cause}")
            claim.commit()
        except KafkaException as error:
            raise UnknownEndError(f"the ids of {self._name} could not be written down: {reason(error)}") from error
        self._numbers, self._written_at = numbers, written[-1].offset()

    def close(self) -> None:
        """Discard the writers with all they hold."""
        writers, self._writers = self._writers, []
        claim, self._claim = self._claim, None
        self._numbers, self._written_at = _FIRST, None
        _close_all(writers)
        if claim is not None:
            claim.close()


def _close_all(writers: Iterable[tuple[int, TransactionalWriter]]) -> None:
    for _, writer in writers:
        writer.close()
