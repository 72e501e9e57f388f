"""The logs of one half partition, a coordinator on them that may be restarted at any step, and the expected result.

All of it is chosen by a seed: what is written to the logs, how far they are read, what is published, which Kafka
transactions fail or end in doubt, which logs are truncated, and when the coordinator restarts from what is left.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

from penstock.transactions.core.checkpoints import DoneMarks, Mark
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.recovered_state import live_snapshots, without_payloads
from penstock.transactions.core.state import PartitionState
from penstock.transactions.wire.done_records import Done
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

GROUP = "orders"
#: Topics and keys of messages whose order is that of their decisions.
TARGETS = (("topic", None), ("topic", b"x"), ("topic", b"x"), ("other", b"x"), ("other", b"x"))
ENDS = frozenset({Verdict.COMMIT, Verdict.ROLLBACK, Verdict.DISCARD})


@dataclass
class Life:
    """A transaction as its producer knows it; a resumed one from the discarded topic begins another life."""

    transaction_id: str
    count: int
    #: Offsets of the halves written so far, in the order of their parts.
    places: list[int] = field(default_factory=list)
    #: Topic and key of each.
    targets: list[tuple[str, bytes | None]] = field(default_factory=list)
    #: So many halves are ever written.
    written: int = 0
    order_key: bytes | None = None
    deliver_at_ms: int | None = None
    resumed: bool = False
    #: Where the op log has the decision that counts.
    decided_at: tuple[int, int] = (-1, -1)

    @property
    def is_whole(self) -> bool:
        return len(self.places) == self.count


def payload_of(transaction_id: str, number: int) -> bytes:
    """Return a message's value: each is unique."""
    return f"{transaction_id} {number}".encode()


class World:
    """One seeded run."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - the same run for the same seed
        self.lives: list[Life] = []
        self.halves: list[Half] = []
        self.ops: list[list[Op]] = []
        #: When each was stored, by the broker's clock.
        self.appended: list[int] = []
        self.done: list[Done] = []
        self.half_low = self.op_low = self.done_low = 0
        self.positions = (0, 0)
        #: Ids and part numbers as they became visible, with the time.
        self.published: list[tuple[str, int, int]] = []
        self.ends: Counter[tuple[str, Verdict]] = Counter()
        #: Topics that take nothing.
        self.out: set[str] = set()
        self.now_ms = 1_000
        self.happened: Counter[str] = Counter()
        self.refused = 0
        #: As in a coordinator that keeps up: a decision is read when its halves are, so that its place is its turn.
        self.waits_for_halves = self.chance.random() < 0.5
        #: Nothing begins any more.
        self.is_draining = False
        self.restart()

    def restart(self) -> None:
        records = [(offset, self.done[offset]) for offset in range(self.done_low, len(self.done))]
        notes = [note for _, record in records for note in record.notes]
        self.state = PartitionState(*self.positions)
        # As in a coordinator: what is snapshotted is read again when it is needed.
        stripped = [(offset, without_payloads(record)) for offset, record in records]
        self.state.remember(notes, live_snapshots(stripped if self.chance.random() < 0.7 else records))
        self.state.payloads.limit = self.chance.choice((500, 2_000, 1_000_000))
        halves = [self.positions[0], *(note.half_offset + 1 for note in notes)]
        ops = [self.positions[1], *(note.op_offset + 1 for note in notes)]
        self.marks = DoneMarks(Mark(len(self.done), max(halves), max(ops)))

    def look_at_the_clock(self) -> None:
        """Release due transactions, as a coordinator does after it has read the logs' content at its start."""
        if self.state.op_position >= len(self.ops):
            self.state.now_ms = self.now_ms

    def begin(self) -> None:
        """A producer starts a transaction: most have one half."""
        chance = self.chance
        life = Life(new_id(), chance.choice((1, 1, 1, 1, 2, 3)))
        if chance.random() < 0.4:
            life.order_key = chance.choice((b"a", b"b"))
        elif chance.random() < 0.2:
            life.deliver_at_ms = self.now_ms + chance.choice((-5, 10, 100))
        # Of some, a half is never stored.
        life.written = life.count - (life.count > 1 and chance.random() < 0.2)
        self.lives.append(life)
        self.store(life)

    def store(self, life: Life) -> None:
        number = len(life.places) + 1
        part = (number, life.count) if life.count > 1 else None
        is_plain = life.order_key is None and life.deliver_at_ms is None
        topic, key = self.chance.choice(TARGETS) if is_plain else ("topic", life.order_key)
        life.targets.append((topic, key))
        life.places.append(len(self.halves))
        self.halves.append(
            Half(
                life.transaction_id,
                GROUP,
                topic,
                None,
                key,
                payload_of(life.transaction_id, number),
                (("h", b"1"),),
                None,
                deliver_at_ms=life.deliver_at_ms,
                part=part,
                order_key=life.order_key,
                resumed="place" if life.resumed else None,
            )
        )

    def go_on(self) -> None:
        """A producer stores the next half of a transaction of several."""
        open_lives = [life for life in self.lives if len(life.places) < life.written]
        if open_lives:
            self.store(self.chance.choice(open_lives))

    def decide(self) -> None:
        """Write an op record with decisions, right or wrong ones."""
        settled = [life for life in self.lives[-12:] if len(life.places) == life.written]
        if settled:
            lives = self.chance.sample(settled, min(len(settled), self.chance.choice((1, 1, 2, 4))))
            self.append([self.decision(life) for life in lives])

    def append(self, ops: list[Op]) -> None:
        self.ops.append(ops)
        self.appended.append(self.now_ms)

    def cancel(self) -> None:
        """Its producer, or an operator, takes a message back that is to be published later; others try it, too."""
        later = [life for life in self.lives if life.deliver_at_ms is not None and life.is_whole]
        if later:
            life = self.chance.choice(later)
            author = self.chance.choice((Author.PRODUCER, Author.OPERATOR, Author.CHECK))
            self.append([Op(life.transaction_id, Verdict.ROLLBACK, author, GROUP, 0, tuple(life.places), 0)])

    def decision(self, life: Life) -> Op:
        chance = self.chance
        verdict = chance.choice((Verdict.COMMIT, Verdict.COMMIT, Verdict.ROLLBACK, Verdict.DISCARD, Verdict.UNKNOWN))
        places = tuple(life.places)
        author = Author.PRODUCER if verdict in {Verdict.COMMIT, Verdict.ROLLBACK} else Author.CHECK
        group = GROUP
        kind = chance.random()
        if kind < 0.1:
            # Who could not know whether it was stored. A life that was resumed is known by its place.
            places = () if verdict is Verdict.ROLLBACK and not self.is_resumed(life) else places
        elif kind < 0.2:
            author, places = Author.CHECK, places[:1]
        elif kind < 0.25:
            group = "others"
        elif kind < 0.3:
            places = (10_000,)
        elif kind < 0.35:
            # A producer that committed knows all of its halves.
            author, places = Author.PRODUCER, places[:1]
        return Op(life.transaction_id, verdict, author, group, 0, places, chance.randrange(4))

    def is_resumed(self, life: Life) -> bool:
        return any(other.transaction_id == life.transaction_id and other.resumed for other in self.lives)

    def resume(self) -> None:
        """An operator brings a discarded transaction back: same id, other halves, counted afresh."""
        gone = [
            life
            for life in self.lives
            if life.is_whole
            and self.ends[life.transaction_id, Verdict.DISCARD] == 1
            and not self.is_resumed(life)
            # With a place unknown, it could be decided by what was said of its former life.
            and all(op.half_offsets for ops in self.ops for op in ops if op.transaction_id == life.transaction_id)
        ]
        if gone:
            former = self.chance.choice(gone)
            count = former.count
            life = Life(former.transaction_id, count, written=count, order_key=former.order_key, resumed=True)
            self.lives.append(life)
            while not life.is_whole:
                self.store(life)
            self.happened["resumed"] += 1

    def read_half(self) -> None:
        offset = self.state.half_position
        if offset < len(self.halves):
            assert offset >= self.half_low, "what was truncated is needed"
            half = self.halves[offset]
            self.state.add_half(offset, half, self.now_ms)
            self.refused += len(self.state.judge_held(half.transaction_id))

    def read_op(self) -> None:
        offset = self.state.op_position
        if offset < len(self.ops):
            named = {op.transaction_id for op in self.ops[offset]}
            halves = self.halves[self.state.half_position :]
            if self.waits_for_halves and any(half.transaction_id in named for half in halves):
                self.read_half()
                return
            assert offset >= self.op_low, "what was truncated is needed"
            for index, op in enumerate(self.ops[offset]):
                refusal = self.state.add_op(offset, op, self.appended[offset], index)
                self.refused += refusal is not None
            self.state.skip_op(offset)

    def snapshot(self) -> list[Pending]:
        """Sometimes choose the lower part of the records that are only in the half log."""
        if self.chance.random() < 0.7:
            return []
        lower: list[Pending] = []
        for pending in self.state.places.only_in_half_log.values():
            if not pending.is_complete or len(lower) == 3:
                break
            if pending.dropped is not None:
                self.state.payloads.want(pending)
                break
            lower.append(pending)
        self.happened["snapshotted"] += len(lower)
        return lower

    def publish(self, limit: int, *, refuses: str | None = None, end: str = "committed") -> None:
        """One Kafka transaction: targets, completions and positions, all or nothing."""
        self.look_at_the_clock()

        def out(pending: Pending) -> str | None:
            if pending.half.transaction_id == refuses or self.is_out(pending):
                return next((half.topic for half in pending.halves if half.topic in self.out), pending.half.topic)
            return None

        batch = self.state.next_batch(limit, out, self.snapshot())
        if batch is None:
            return
        # As the coordinator does before it reads on: what is under way keeps its payload.
        self.mark(batch, in_flight=True)
        done_from = self.marks.end
        record = Done(batch.notes(), batch.snapshots)
        assert all(half.value for snapshot in batch.snapshots for _, _, half in snapshot.halves), (
            "what is snapshotted is whole"
        )
        if self.chance.random() < 0.5:
            # Reading goes on while the Kafka transaction is under way.
            self.read_op()
            self.read_half()
        start = len(self.done)
        if end in {"committed", "in doubt, committed"}:
            self.take_hold(batch, record)
            if self.chance.random() < 0.3:
                # The logs are looked at while it is under way, and trimmed below the positions that are known.
                self.truncate()
                self.happened["truncated meanwhile"] += 1
            assert batch.half_checkpoint >= self.positions[0], "positions never go back"
            assert batch.op_checkpoint >= self.positions[1], "positions never go back"
            self.positions = (batch.half_checkpoint, batch.op_checkpoint)
            if not self.is_draining and self.chance.random() < 0.5:
                self.go_on_before_it_is_known()
        self.mark(batch, in_flight=False)
        if end == "committed":
            self.state.apply(batch, done_from)
        elif end.startswith("in doubt"):
            found = [(offset, self.done[offset]) for offset in range(start, len(self.done))]
            notes = [note for _, one in found for note in one.notes]
            self.state.settle(notes, live_snapshots(found))
        self.judge_held(batch)
        self.happened[end] += 1

    def is_out(self, pending: Pending) -> bool:
        """Return whether a transaction cannot be published: a target refuses, or its payload is not in memory."""
        return pending.dropped is not None or any(half.topic in self.out for half in pending.halves)

    def take_hold(self, batch: CommitBatch, record: Done) -> None:
        for pending in batch.decided:
            self.ends[pending.half.transaction_id, pending.verdict or Verdict.UNKNOWN] += 1
            if pending.verdict is Verdict.COMMIT:
                for number, half in enumerate(pending.halves, 1):
                    assert half.value == payload_of(half.transaction_id, number), "its own payload is published"
                names = [(half.transaction_id, (half.part or (1, 1))[0]) for half in pending.halves]
                self.published += [(name, number, self.now_ms) for name, number in names]
        self.done.append(record)

    def try_apart(self) -> None:
        """Publish some set-aside transactions of a topic, if they are in memory; this moves no positions."""
        topic, limit = self.chance.choice(("topic", "other")), self.chance.choice((1, 100))
        some = self.state.queue.set_aside.take(topic, limit, lambda _: False)
        for pending in some:
            if pending.dropped is not None:
                self.state.payloads.want(pending)
        batch = CommitBatch(list(takewhile(lambda one: one.dropped is None, some)), -1, -1)
        if batch.decided:
            self.take_hold(batch, Done(batch.notes(), ()))
            self.state.apply(batch, self.marks.end)
            self.judge_held(batch)
            self.happened["tried apart"] += 1

    def judge_held(self, batch: CommitBatch) -> None:
        """Have the decisions judged that waited for the end of a Kafka transaction."""
        names = [pending.half.transaction_id for pending in batch.decided]
        names += [snapshot.note.transaction_id for snapshot in batch.snapshots]
        self.refused += sum(len(self.state.judge_held(name)) for name in names)

    def mark(self, batch: CommitBatch, *, in_flight: bool) -> None:
        """Mark the transactions of a Kafka transaction as under way, or no longer so."""
        snapshotted = [self.state.pending.get(snapshot.note.transaction_id) for snapshot in batch.snapshots]
        for pending in (*batch.decided, *filter(None, snapshotted)):
            pending.in_flight = in_flight

    def go_on_before_it_is_known(self) -> None:
        """A discarded transaction is visible to all: it may be resumed, and read, before the coordinator knows."""
        self.resume()
        self.begin()
        for _ in range(self.chance.choice((1, 2, 5))):
            self.read_half()
            self.read_op()
        self.happened["brought back early"] += bool(self.state._next_lives)

    def drop(self) -> None:
        """Drop the payload of some transaction that is not being published."""
        some = [value for value in self.state.pending.values() if value.dropped is None]
        if some:
            self.state.payloads.drop(self.chance.choice(some))
            self.happened["dropped"] += 1

    def load(self) -> None:
        """Read payloads again that are needed, from where they are kept, or fail to."""
        state = self.state
        payloads = state.payloads
        for pending in payloads.next_read(self.now_ms):
            if self.chance.random() < 0.2:
                continue
            name, place, halves = pending.half.transaction_id, None, []
            if pending.snapshot_at is None:
                assert pending.offset >= self.half_low, "what was truncated is needed"
                halves = [(offset, self.halves[offset]) for offset in pending.offsets]
            else:
                for place in range(max(pending.snapshot_at, self.done_low), len(self.done)):
                    found = [one for one in self.done[place].snapshots if one.note.transaction_id == name]
                    # Of an earlier life are others' halves.
                    halves = [(h.offset, h.half) for one in found for h in one.halves if h.offset in pending.offsets]
                    if halves:
                        break
            assert state.load(name, halves, place) is pending, "what was dropped can be read again"
            self.happened["loaded"] += 1

    def truncate(self) -> None:
        """Delete the records that are no longer needed."""
        state = self.state
        self.marks.add(Mark(len(self.done), state.half_position, state.op_position))
        snapshotted = [p.snapshot_at or 0 for p in state.places.snapshotted.values()][:1]
        self.half_low, self.op_low = self.positions
        # Who has just started knows of no lower end yet.
        low = max(self.marks.low(*self.positions, snapshotted), self.done_low)
        only_in_half_log = [pending.offset for pending in state.places.only_in_half_log.values()]
        assert only_in_half_log == sorted(only_in_half_log), (
            "the lowest goes first: where it is, reading starts after a restart"
        )
        self.happened["truncated"] += low - self.done_low
        self.done_low = low

    def step(self) -> None:
        self.now_ms += self.chance.choice((0, 1, 5))
        moves, weights = zip(*MOVES, strict=True)
        self.chance.choices(moves, weights)[0](self)

    def publish_somehow(self) -> None:
        chance = self.chance
        refuses = chance.choice(self.lives).transaction_id if self.lives and chance.random() < 0.3 else None
        end = chance.choice(("committed",) * 5 + ("aborted", "in doubt, committed", "in doubt, aborted"))
        self.publish(chance.choice((1, 2, 3, 100)), refuses=refuses, end=end)

    def put_out(self) -> None:
        """Let a topic take nothing."""
        self.out.add(self.chance.choice(("topic", "other", "other", "other")))

    def release(self) -> None:
        self.out.clear()
        for topic in ("topic", "other"):
            self.state.queue.release(topic, lambda _: False)

    def sweep(self) -> None:
        self.refused += self.state.sweep_held(len(self.halves))

    def start_anew(self) -> None:
        self.happened["restarted"] += 1
        self.restart()

    def run(self, steps: int = 250) -> None:
        for _ in range(steps):
            self.step()
        self.drain()
        self.verify()

    def drain(self) -> None:
        """Let all that can happen happen, from a restart."""
        self.is_draining = True
        for life in self.lives:
            while len(life.places) < life.written:
                self.store(life)
        for life in self.lives:
            # Or it would hold its key for ever.
            if life.order_key is not None and self.first_decision(life) is None:
                places = tuple(life.places)
                verdict = Verdict.DISCARD if life.is_whole else Verdict.ROLLBACK
                self.append([Op(life.transaction_id, verdict, Author.COORDINATOR, GROUP, 0, places, 0)])
        self.restart()
        self.now_ms += 1_000
        while self.state.half_position < len(self.halves) or self.state.op_position < len(self.ops):
            self.read_half()
            self.read_op()
        for _ in range(2):
            self.state.sweep_held(len(self.halves))
        self.release()
        self.publish_all()
        # What a coordinator does after the transaction timeout: the rest of a transaction that was rolled back before
        # all its halves were read.
        rest = [pending for pending in self.state.pending.values() if not pending.is_complete]
        for pending in rest:
            name = pending.half.transaction_id
            if self.ends[name, Verdict.ROLLBACK]:
                self.append([Op(name, Verdict.ROLLBACK, Author.COORDINATOR, GROUP, 0, pending.offsets, 0)])
                self.ends[name, Verdict.ROLLBACK] -= 1
        while self.state.op_position < len(self.ops):
            self.read_op()
        self.publish_all()

    def publish_all(self) -> None:
        self.publish(3)
        while self.state.has_work or self.state.queue.delays or self.state.queue.set_aside:
            self.publish(3)
            self.try_apart()
            self.load()

    def verify(self) -> None:
        """Compare the state with the logs."""
        first = [(life, self.first_decision(life)) for life in self.lives]
        held = sum(pending.held_bytes for pending in self.state.pending.values() if pending.dropped is None)
        assert self.state.payloads.bytes == held, "bytes are counted as they come and go"
        wanted = Counter(
            (life.transaction_id, number)
            for life, verdict in first
            if verdict is Verdict.COMMIT
            for number in range(1, life.count + 1)
        )
        assert Counter((name, number) for name, number, _ in self.published) == wanted, "I7: published iff committed"
        ends = Counter((life.transaction_id, verdict) for life, verdict in first if verdict is not None)
        # What was rolled back before all its halves were read may be rolled back again for the rest.
        for life in self.lives:
            rolled_back = life.transaction_id, Verdict.ROLLBACK
            if life.count > 1 and self.ends[rolled_back] > 1:
                self.ends[rolled_back] = 1
        assert +self.ends == ends, "each transaction ends once, as was decided first"
        left = {life.transaction_id: life for life, verdict in first if verdict is None}
        assert set(self.state.pending) == set(left), "what is not decided is pending"
        for name, pending in self.state.pending.items():
            assert pending.check_count == self.answered(left[name]), "answered checks are counted once"
        self.verify_order()

    def verify_order(self) -> None:
        places = {(life.transaction_id, life.resumed): life.places[0] for life in self.lives}
        known = {life.transaction_id: life for life in self.lives}
        lines: dict[bytes, list[int]] = {}
        decided: dict[tuple[str, bytes | None], list[tuple[int, int]]] = {}
        for at, (name, number, when) in enumerate(self.published):
            life = known[name]
            if life.order_key is not None and number == 1:
                lines.setdefault(life.order_key, []).append(places[name, life.resumed])
            if life.deliver_at_ms is not None:
                assert when >= life.deliver_at_ms, "nothing is published before its time"
            if number > 1:
                assert self.published[at - 1][:2] == (name, number - 1), "the parts go together, in their order"
            if self.waits_for_halves and life.order_key is None and (target := life.targets[number - 1])[1] is not None:
                decided.setdefault(target, []).append(life.decided_at)
        for line in lines.values():
            assert line == sorted(line), "per key in send order"
        for turns in decided.values():
            assert turns == sorted(turns), "per key in the order of decisions"

    def first_decision(self, life: Life) -> Verdict | None:
        """Return the decision in the op log: the first one, unless it is a COMMIT that was taken back in time."""
        decided = None
        for op, appended_ms, place in self.valid(life):
            if decided is None and op.verdict in ENDS and (op.verdict is Verdict.ROLLBACK or life.is_whole):
                decided, life.decided_at = op.verdict, place
            elif (
                decided is Verdict.COMMIT
                and (life.deliver_at_ms or 0) > appended_ms
                and op.verdict is Verdict.ROLLBACK
                and op.author in {Author.PRODUCER, Author.OPERATOR}
            ):
                self.happened["cancelled"] += 1
                return Verdict.ROLLBACK
        return decided

    def answered(self, life: Life) -> int:
        count = 0
        for op, _, _ in self.valid(life):
            count += op.verdict is Verdict.UNKNOWN and op.check_number == count + 1
        return count

    def valid(self, life: Life) -> list[tuple[Op, int, tuple[int, int]]]:
        return [
            (op, self.appended[offset], (offset, index))
            for offset, ops in enumerate(self.ops)
            for index, op in enumerate(ops)
            if op.transaction_id == life.transaction_id and op.group == GROUP and self.names(op, life)
        ]

    @staticmethod
    def names(op: Op, life: Life) -> bool:
        if not op.half_offsets:
            return True
        if life.count == 1 or (op.author is Author.PRODUCER and op.verdict is Verdict.COMMIT):
            return op.half_offsets == tuple(life.places)
        return set(op.half_offsets) <= set(life.places)


#: What may happen next, and how often.
MOVES = (
    (World.begin, 14),
    (World.go_on, 4),
    (World.decide, 14),
    (World.resume, 2),
    (World.cancel, 1),
    (World.read_half, 22),
    (World.read_op, 22),
    (World.publish_somehow, 14),
    (World.put_out, 3),
    (World.release, 2),
    (World.try_apart, 3),
    (World.sweep, 2),
    (World.drop, 4),
    (World.load, 8),
    (World.truncate, 2),
    (World.start_anew, 2),
)

__all__ = ["GROUP", "Life", "World"]
