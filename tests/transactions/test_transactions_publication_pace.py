"""What a producer that outruns the publication is held by, and what it is not: answers of stored decisions."""

from __future__ import annotations

from functools import partial

from penstock.transactions.stores.kafka.publication_pace import PublicationPace
from penstock.transactions.wire.done_records import Note, encode_done, last_settled
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict

#: What may be decided and not published while 92 are in flight.
ROOM = 300


class World:
    """A pace with a clock of its own, that stores decisions of one half partition."""

    def __init__(self) -> None:
        self.now, self.in_flight, self.followed = 0.0, 92, 0
        self.pace = PublicationPace(lambda: self.in_flight, self._follow, lambda: self.now)
        self.stored, self.answered = 0, list[int]()

    def _follow(self) -> None:
        self.followed += 1

    def store(self, records: int, count: int = 10) -> None:
        """Store so many op records of so many decisions each."""
        for _ in range(records):
            self.pace.stored(0, self.stored, count, partial(self.answered.append, self.stored))
            self.stored += 1

    def publish(self, *, to: int | None = None, index: int = 9) -> None:
        """Publish what is stored, or what lies before and in a record."""
        self.pace.published(0, (self.stored - 1 if to is None else to, index))

    def keeps_up(self) -> None:
        """Make the producer busy, and see publication keep up: it takes 5 ms."""
        self.store(30)
        self.publish()
        self.store(1)
        self.now += 0.005
        self.publish()
        self.answered.clear()


def test_answers_beyond_what_may_be_unpublished_wait_until_enough_was_published() -> None:
    world = World()
    world.keeps_up()
    first = world.stored

    world.store(1)
    world.now += 0.02
    world.store(99)
    held_from = len(world.answered)
    world.publish(to=first + 29)
    world.now += 0.02
    world.publish(to=first + 49)

    assert held_from == ROOM // 10
    assert world.answered == list(range(first, first + 50 + ROOM // 10))


def test_a_producer_that_is_not_busy_follows_nothing_and_is_never_held() -> None:
    world = World()

    for _ in range(200):
        world.store(1)
        world.now += 0.05

    assert not world.followed
    assert len(world.answered) == 200


def test_at_the_end_all_is_answered_and_nothing_held_any_more() -> None:
    world = World()
    world.keeps_up()
    world.store(1)
    world.now += 0.02
    world.store(99)

    world.pace.end()
    world.store(10)
    world.publish()
    world.store(100)

    assert len(world.answered) == 210


def test_a_glance_at_a_done_record_tells_what_is_settled_last() -> None:
    settled = [Note(new_id(), 5, Verdict.COMMIT, 0, 0, 7, 1), Note(new_id(), 6, Verdict.ROLLBACK, 0, 0, 7, 2)]
    asked = Note(new_id(), 4, Verdict.UNKNOWN, 1, 0, 9, 0)

    assert last_settled(encode_done([*settled, asked])) == (7, 2)
    assert last_settled(encode_done([asked])) is None
    assert last_settled(encode_done(settled)[:-1]) is None
    assert last_settled(None) is None
