"""The shelf of a file store: what counts as held or delayed, and what is taken back before its time. Pure."""

from __future__ import annotations

from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.ready_queue import ReadyQueue
from penstock.transactions.stores.relay.quarantine import Reason
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict


def stored(number: int, deliver_at_ms: int | None = None) -> StoredTransaction:
    return StoredTransaction(
        transaction_id=new_id(),
        group="orders",
        number=number,
        birth_ms=0,
        check_count=0,
        answered_ms=0,
        verdict=Verdict.COMMIT,
        decided=number,
        place=0,
        size=1,
        immunity_ms=None,
        deliver_at_ms=deliver_at_ms,
        line=None,
        topics=("t",),
    )


def test_what_was_refused_and_is_settled_since_is_not_held_any_more() -> None:
    shelf, ones = ReadyQueue(), [stored(number) for number in (1, 2)]
    for one in ones:
        shelf.add(one, 0)
    for one in shelf.take(0, 10):
        shelf.hold(one, Reason("it is refused"))
    assert shelf.refused == 2

    for one in ones:
        shelf.remove(one)

    assert shelf.refused == 0
    assert shelf.take(0, 10) == []


def test_what_waits_for_its_time_can_be_held_back_until_then_and_put_back() -> None:
    shelf, one, other = ReadyQueue(), stored(1, deliver_at_ms=100), stored(2, deliver_at_ms=100)
    for each in (one, other):
        shelf.add(each, 0)

    assert shelf.hold_back(one)
    assert not shelf.hold_back(one)
    assert shelf.delayed == 1
    assert shelf.take(100, 10) == [other]
    assert not shelf.hold_back(other)

    shelf.decided(one, 50)
    assert shelf.take(100, 10) == [one]
