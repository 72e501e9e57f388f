"""Runs of the file store's log and table on a disk that tears writes, compared with a model (I8).

A run is chosen by its seed: batches of changes, clean stops, power cuts and kills at any operation of the disk, also
while the store opens or stops, disks that are full, state tables that are gone, torn, or of another time than the log;
and at its end, damage to what had been acknowledged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from penstock.errors import StoreDamagedError
from penstock.transactions.stores.file.log.entries import Settled, StoredTransaction
from penstock.transactions.stores.file.log.redo import MARK, SUFFIX, NoRoomError
from penstock.transactions.stores.file.log.table import KEYS, ROWS, STOPPED, State, tick_of
from penstock.transactions.stores.file.open_store import Change, OpenStore
from penstock.transactions.stores.relayed_store import Decide, Prepare
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict
from simulation.torn_disk import PowerCut, TornDisk

GROUPS = ("orders", "bank")
#: A run is in the future, and so is what it delays: that waits in the table. By the run's own clock it is due, so that
#: nothing takes it back.
CLOCK_MS, DUE_MS = 2_600_000_000_000, 2_500_000_000_000
VERDICTS = (Verdict.COMMIT, Verdict.COMMIT, Verdict.ROLLBACK, Verdict.DISCARD, Verdict.UNKNOWN, Verdict.UNKNOWN)


class Lost(AssertionError):  # noqa: N818 - it says what happened to the data
    """The store came back to a state that its acknowledged changes do not imply."""


@dataclass
class Row:
    """The state of one transaction that a store must know."""

    halves: tuple[Half, ...]
    verdict: Verdict | None = None
    checks: int = 0
    answered_ms: int = 0

    @property
    def tick(self) -> int:
        """When the last check was answered, while it is not decided; and then, when it is due."""
        if self.verdict is None:
            return tick_of(self.answered_ms)
        return tick_of(self.halves[0].deliver_at_ms or 0) if self.verdict is Verdict.COMMIT else 0


@dataclass
class Model:
    """The state that the acknowledged changes imply, by simple rules written a second time."""

    rows: dict[str, Row] = field(default_factory=dict)
    #: Ids in the order of their decisions.
    decided: list[str] = field(default_factory=list)

    def apply_all(self, batch: Sequence[Change]) -> None:
        # An answered check shows once its batch is durable.
        checks = {name: row.checks for name, row in self.rows.items()}
        for change in batch:
            self._apply(change, checks)

    def _apply(self, change: Change, checks: Mapping[str, int]) -> None:
        if isinstance(change, Prepare):
            self.rows.setdefault(change.halves[0].transaction_id, Row(change.halves))
            return
        if isinstance(change, Settled):
            for transaction_id in change.transaction_ids:
                self.rows.pop(transaction_id, None)
                self.decided = [other for other in self.decided if other != transaction_id]
            return
        row = self.rows.get(change.transaction_id)
        if row is None or row.verdict is not None or row.halves[0].group != change.group:
            return
        if change.verdict is Verdict.ROLLBACK:
            # There is nothing left to do for it.
            del self.rows[change.transaction_id]
        elif change.verdict is not Verdict.UNKNOWN:
            row.verdict = change.verdict
            self.decided.append(change.transaction_id)
        elif change.check_number == checks.get(change.transaction_id, 0) + 1:
            row.checks, row.answered_ms = change.check_number, change.now_ms

    def state(self) -> tuple[object, ...]:
        """Return all of it, to be compared: transactions in the order they were prepared, and of their decisions."""
        rows = [(row.halves, row.verdict, row.checks, row.tick) for row in self.rows.values()]
        return rows, self.decided


def state_of(store: OpenStore) -> tuple[object, ...]:
    """Return the state of a store, as `Model.state` does: by its table, and halves read from its log."""
    numbers = [number for number, _ in store.table]
    stored = [one for number in numbers if (one := store.load(number)) is not None]
    stored.sort(key=lambda one: one.number)
    # What is not in memory is found by its id.
    parked = [one for one in stored if one.transaction_id not in store.live]
    assert all(store.table.find(id_bytes(one.transaction_id)) == one.offset for one in parked)
    rows = [(tuple(one.halves), one.verdict, one.check_count, _tick(store, one)) for one in stored]
    decided = sorted((one for one in stored if one.verdict is not None), key=lambda one: one.decided)
    return rows, [decision.transaction_id for decision in decided]


def _tick(store: OpenStore, stored: StoredTransaction) -> int:
    row = store.table.row(stored.offset)
    return row.tick if row.state == State.DELAYED else tick_of(stored.answered_ms)


def shown(state: tuple[object, ...]) -> str:
    """Return a state in few words."""
    rows, decided = state
    assert isinstance(rows, list)
    return f"{[(halves[0].transaction_id, *rest) for halves, *rest in rows]}, decided {decided}"


class Run:
    """One seed's run."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"file store {seed}")  # noqa: S311 - a seed must give the same run again
        self.seed = seed
        self.disk = TornDisk(self.chance)
        self.segment_bytes = self.chance.choice((200, 600, 600, 3_000))
        self.model = Model()
        #: The model with the batch under way, while it is not known whether it is on the disk.
        self.unsure: Model | None = None
        self.clock = CLOCK_MS
        self.seen: Counter[str] = Counter()
        self.last_frame = 0
        self.ids: list[str] = []
        #: A state table that was there before.
        self.former: dict[str, bytes] = {}
        self.store = self.open()

    def open(self) -> OpenStore:
        """Open the store as often as it takes, and compare."""
        self.spoil_table()
        for left in (*(self.chance.choice((None, self.chance.randrange(12))) for _ in range(2)), None):
            store = OpenStore(self.disk, self.segment_bytes)
            self.disk.left = left
            was_sealed = STOPPED in self.disk.files
            try:
                store.open()
            except PowerCut:
                self.seen["crash while opening"] += 1
                self.disk.restart(power=self.chance.random() < 0.7)
                continue
            except StoreDamagedError as error:
                raise Lost(f"seed {self.seed}: acknowledged or not, nothing was damaged: {error}") from error
            self.disk.left = None
            self.seen["table taken over"] += was_sealed and not store.was_rebuilt
            self.seen["table made again"] += was_sealed and store.was_rebuilt
            break
        self.compare(store)
        return store

    def spoil_table(self) -> None:
        """Lose the state table, tear it, or bring one back that was there before."""
        files, chance = self.disk.files, self.chance
        names = [name for name in (ROWS, KEYS, STOPPED) if name in files]
        how = chance.choice(("none",) * 6 + ("missing", "torn", "older", "kept"))
        if how == "missing":
            for name in chance.sample(names, chance.randrange(len(names) + 1)):
                del files[name]
        elif how == "torn" and names:
            content = files[chance.choice(names)].cached
            at = chance.randrange(len(content) + 1)
            content[at : at + 16] = chance.randbytes(len(content[at : at + 16]))
        elif how == "older":
            for name, former in self.former.items():
                self.disk.write(name, 0, former)
        elif how == "kept":
            self.former = {name: bytes(files[name].cached) for name in names}
        self.seen[f"table: {how}"] += 1

    def stop(self) -> None:
        """Stop cleanly, unless the power is cut meanwhile, and open again."""
        if self.chance.random() < 0.2:
            self.disk.left = self.chance.randrange(6)
        try:
            self.store.close()
        except PowerCut:
            self.seen["crash while stopping"] += 1
        if self.disk.left is not None or self.chance.random() < 0.3:
            self.disk.restart(power=self.chance.random() < 0.7)
        self.store = self.open()

    def compare(self, store: OpenStore) -> None:
        found = state_of(store)
        if self.unsure is not None and found == self.unsure.state():
            self.seen["came after all"] += found != self.model.state()
            self.model = self.unsure
        elif found != self.model.state():
            raise Lost(f"seed {self.seed}: {shown(found)} instead of {shown(self.model.state())}")
        self.unsure = None

    def run(self, batches: int) -> None:
        """Make batches with crashes, then damage the files."""
        for _ in range(batches):
            self.clock += self.chance.randrange(5_000)
            # No caller decides or settles an unacknowledged half.
            known = [tx for tx in self.ids if tx in self.model.rows or self.chance.random() < 0.1]
            self.commit([self.change(known, place) for place in range(self.chance.choice((1, 1, 2, 5)))])
            if self.chance.random() < 0.2:
                self.stop()
        self.store = self.open()
        if self.chance.random() < 0.5:
            self.store.close()
        self.damage()

    def commit(self, batch: Sequence[Change]) -> None:
        self.unsure = deepcopy(self.model)
        self.unsure.apply_all(batch)
        if self.chance.random() < 0.15:
            self.disk.left = self.chance.randrange(10)
        if self.chance.random() < 0.05:
            self.disk.room = 0
        if self.chance.random() < 0.05:
            self.disk.good_syncs = self.chance.randrange(5)
        begin, bases = self.store.redo.end, self.store.redo.bases
        try:
            self.store.commit(batch)
            if (failure := self.store.failure) is not None:
                # It failed after the batch had become durable.
                self.seen["failed later"] += 1
                self.model, self.unsure = self.unsure, None
                raise failure.__cause__ or failure
        except NoRoomError:
            self.seen["no room"] += 1
            self.disk.left = self.disk.room = self.disk.good_syncs = None
            self.unsure = None
            self.compare(self.store)
            return
        except (PowerCut, OSError) as error:
            # After a sync that failed, the store takes nothing more: it is opened again, after a power cut or not.
            self.seen["failed sync" if isinstance(error, OSError) else "crash"] += 1
            self.disk.room = None
            self.disk.restart(power=self.chance.random() < 0.7)
            self.store = self.open()
            return
        self.disk.left = self.disk.room = self.disk.good_syncs = None
        self.model, self.unsure = self.unsure, None
        if self.store.redo.end > begin:
            self.last_frame = max(begin, self.store.redo.bases[-1])
        self.seen["rotated"] += self.store.redo.bases != bases
        self.seen["removed"] += self.store.redo.bases[0] != bases[0]
        if self.chance.random() < 0.1:
            self.compare(self.store)

    def change(self, ids: list[str], place: int) -> Change:
        """Choose a change among transactions, for a place in a batch; some must be refused."""
        chance = self.chance
        if not ids or chance.random() < 0.45:
            repeated = [tx for tx in ids if (row := self.model.rows.get(tx)) is not None and row.verdict is None]
            again = repeated and place == 0 and chance.random() < 0.1
            transaction_id = chance.choice(repeated) if again else self.new_id()
            self.ids.append(transaction_id)
            return Prepare(self.halves(transaction_id), self.clock)
        # The latest are the likeliest; some stay undecided for long.
        transaction_id = ids[-1 - min(int(chance.expovariate(0.3)), len(ids) - 1)]
        row = self.model.rows.get(transaction_id)
        if row is not None and row.verdict is not None and chance.random() < 0.7:
            done = [decision for decision in self.model.decided if decision == transaction_id or chance.random() < 0.5]
            return Settled(tuple(done))
        group = row.halves[0].group if row is not None and chance.random() < 0.95 else chance.choice(GROUPS)
        number = (row.checks if row is not None else 0) + chance.choice((1, 1, 1, 0, 2))
        verdict = chance.choice(VERDICTS)
        return Decide(transaction_id, group, verdict, chance.choice(list(Author)), number, self.clock, "eve")

    def new_id(self) -> str:
        """Return an id as `ids.new_id` does, the same one for the same seed."""
        raw = bytearray(len(self.ids).to_bytes(6, "big") + self.chance.randbytes(10))
        raw[6], raw[8] = 0x70 | raw[6] & 0x0F, 0x80 | raw[8] & 0x3F
        return id_text(bytes(raw))

    def halves(self, transaction_id: str) -> tuple[Half, ...]:
        chance = self.chance
        group = chance.choice(GROUPS)
        count = chance.choice((1, 1, 1, 3))
        size = chance.choice((0, 10, 60, 60, 900))
        due_ms = chance.choice((None, None, DUE_MS))
        return tuple(
            Half(
                transaction_id,
                group,
                f"t{number}",
                chance.choice((None, 3)),
                chance.choice((None, b"k")),
                chance.choice((None, chance.randbytes(size))),
                chance.choice(((), (("h", b"1"), ("none", None)))),
                chance.choice((None, 600_000)),
                deliver_at_ms=due_ms,
                part=(number, count) if count > 1 else None,
            )
            for number in range(1, count + 1)
        )

    def damage(self) -> None:
        """Change acknowledged data: the store must refuse, or still know all."""
        for _ in range(3):
            disk = deepcopy(self.disk)
            segments = [name for name in disk.names() if name.endswith(SUFFIX)]
            name = self.chance.choice(segments)
            base, content = int(name.removesuffix(SUFFIX)), disk.files[name].cached
            end = min(self.store.redo.end - base, len(content))
            if self.chance.random() < 0.5:
                # The mark did not reach the disk. Then only the bytes behind the last frame can be judged.
                del disk.files[MARK]
                end = min(end, self.last_frame - base)
            if end <= 0:
                continue
            how = self.chance.choice(("flip", "zero", "cut", "garbage", "foreign"))
            at = self.chance.randrange(end)
            if how == "cut" and MARK not in disk.files and name == segments[-1]:
                # Without the mark, nothing tells a log that was cut from one that was shorter.
                continue
            self.spoil(content, at, end, how, disk.files[self.chance.choice(segments)].cached)
            self.seen[f"damage: {how}"] += 1
            store = OpenStore(disk, self.segment_bytes)
            try:
                store.open()
                state = state_of(store)
            except StoreDamagedError:
                self.seen["damage refused"] += 1
                continue
            if state != self.model.state():
                raise Lost(f"seed {self.seed}: {how} at byte {at} of {name} went unseen")

    def spoil(self, content: bytearray, at: int, end: int, how: str, other: bytes | bytearray) -> None:
        """Change bytes of a file between two places, or cut it at the first."""
        rest = end - at
        if how == "flip":
            content[at] ^= 1 << self.chance.randrange(8)
        elif how == "zero":
            content[at : at + min(16, rest)] = bytes(min(16, rest))
        elif how == "garbage":
            length = min(self.chance.randrange(1, 200), rest)
            content[at : at + length] = self.chance.randbytes(length)
        elif how == "foreign":
            length = len(other[at : at + min(100, rest)])
            content[at : at + length] = other[at : at + length]
        else:
            del content[at:]


def run(seed: int, batches: int = 14) -> Run:
    """Make the run of a seed."""
    made = Run(seed)
    made.run(batches)
    return made
