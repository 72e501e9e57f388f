"""Ends of Kafka transactions that are not known: nothing lost, nothing twice, and no end that ends something else."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.transactions.checks import CheckPolicy
from penstock.transactions.ids import new_id
from penstock.transactions.owned import Counts, OwnedPartition, RationedLog
from penstock.transactions.publisher import InDoubtError
from penstock.transactions.records import Author, Half, Note, Op, Verdict
from penstock.transactions.settlement import Share
from penstock.transactions.settling import Settling
from penstock.transactions.takeover import Inheritance
from penstock.transactions.topics import StoreTopics

TOPICS = StoreTopics("penstock", 1)


@dataclass
class DoneLog:
    """A done log of one partition, and what reads and writes it: each record is the notes of one Kafka transaction."""

    records: list[list[Note]] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    is_open: bool = True
    doubts: int = 0

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def publish(self, shares: Mapping[int, Share], _: object) -> None:
        """Commit, and do not know it the first time."""
        self.records.append(shares[0].notes())
        self.published += [pending.half.transaction_id for pending in shares[0].decided]
        if not self.doubts:
            self.doubts += 1
            raise InDoubtError("the answer was lost")

    def done(
        self, partitions: Iterable[int], starts: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[int, list[Note]]]:
        assert list(partitions) == [0]
        return {0: len(self.records)}, {0: [note for record in self.records[starts[0] :] for note in record]}


class Member:
    """The membership of a coordinator that owns one partition, whose logs have nothing new."""

    def __init__(self, owned: OwnedPartition, log: DoneLog) -> None:
        self.owned = {0: owned}
        self._log = log

    def serve(self) -> None:
        """Nothing changes."""

    def read(self, timeout_s: float) -> list[Any]:
        assert timeout_s >= 0
        return []

    def group_metadata(self) -> None:
        return None

    def known_end(self, topic: str, partition: int) -> int:
        assert topic
        return partition

    def end(self, topic: str, partition: int) -> int:
        assert partition == 0
        return len(self._log.records) if topic == TOPICS.done else 0


class Admin:
    """A broker that deletes nothing."""

    def delete_records(self, points: list[Any], request_timeout: float) -> None:
        assert points
        assert request_timeout


def test_tending_in_the_round_of_a_doubt_does_not_hide_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transactions.settling._TEND_S", 0.0)
    log, counts, ration = DoneLog(), Counts(), RationedLog()
    owned = OwnedPartition(
        0,
        Inheritance(0, 0, half_end=1, op_end=1, notes=[], done_end=0),
        policy=CheckPolicy(6, 30, 15),
        counts=counts,
        log=ration,
        may_publish_to=lambda _: True,
    )
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    owned.settlement.add_half(0, half)
    owned.settlement.add_op(0, Op(half.transaction_id, Verdict.ROLLBACK, Author.PRODUCER, "orders", 0, (0,), 0), 0)
    settling = Settling(
        "servers",
        topics=TOPICS,
        policy=CheckPolicy(6, 30, 15),
        admin=Admin(),  # type: ignore[arg-type] # what is used of it
        membership=Member(owned, log),  # type: ignore[arg-type] # what is used of it
        publisher=log,  # type: ignore[arg-type] # what is used of it
        asker=None,  # type: ignore[arg-type] # no check is due
        logs=log,  # type: ignore[arg-type] # what is used of it
        counts=counts,
        ration=ration,
        stopping=threading.Event(),
    )

    for _ in range(3):
        settling.round()

    assert (log.doubts, counts.recoveries) == (1, 1)
    assert log.published == [half.transaction_id]
    assert counts.rolled_back == 1
