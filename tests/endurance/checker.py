"""Judges a campaign only by its histories: fed and sent messages, calls, and the content of topics and tables.

Pure, and without anything of penstock: no import of it, none of its formats. What counts as a violation:

- lost: a message fed without a call that ended, without a result and without a dead letter; a message of the inbox's
  topic that is not counted; a message of a committed transaction that is not visible; a visible one that Spark did not
  store.
- twice: a result, a dead letter, a counted message, a message of a transaction or a row more often than it was fed.
- torn: some messages of a transaction are visible, and others are not.
- never committed: a visible message whose local transaction did not commit.
- early: a delayed message that was appended before its time.
- out of order: calls of a key (`histories.examine`), results of a key, messages of a key sent with `order="half"`.
- stood still: nothing went on for longer than `LONGEST_S` after the last fault had ended.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from histories import Call, examine

#: Seconds that anything may stand still although no fault goes on.
LONGEST_S = 600.0
#: Seconds between the last event of a stream and the fault that stops it, at most.
_STOPS_WITHIN_S = 3.0
#: Seconds of difference that the clocks of brokers and senders may have.
CLOCK_SLACK_S = 1.0


class Fed(NamedTuple):
    """A message for the workers, at its place in its topic."""

    topic: str
    partition: int
    offset: int
    key: str
    number: int


class Outcome(NamedTuple):
    """The outcome of a message: a visible result or a dead letter, in the order of a reader."""

    topic: str
    key: str
    number: int


class Sent(NamedTuple):
    """A local transaction that committed, and the messages that shall be visible for it."""

    store: str
    name: str
    parts: int
    due_s: float | None


class Visible(NamedTuple):
    """A message of a transaction as readers of committed messages see it, in their order."""

    topic: str
    key: str
    name: str
    part: int
    number: int
    appended_s: float


class Fault(NamedTuple):
    """A fault: kind, target, begin and end in monotonic seconds."""

    kind: str
    target: str
    begin: float
    end: float


class Standstill(NamedTuple):
    """The longest time without progress of a stream, and the stream."""

    seconds: float
    stream: str


@dataclass(frozen=True, slots=True)
class History:
    """All that happened in a campaign.

    Attributes:
        fed: messages for the workers.
        calls: their calls, by topic; a call that failed and is made again is not among them.
        results: visible results.
        dead: dead letters.
        counted: numbers that the handler of batches counted.
        counted_topic: the topic that it counts.
        sent: local transactions that committed.
        visible: visible messages of transactions.
        stored: how often Spark stored a message, by `name/part`; None where no query ran.
        stored_topics: the topics that Spark reads.
        faults: what was done.
        progress: when each stream went on, in monotonic seconds.
        quiet: when nothing more was fed and sent; from then on streams may end.
    """

    fed: Sequence[Fed] = ()
    calls: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    results: Sequence[Outcome] = ()
    dead: Sequence[Outcome] = ()
    counted: Sequence[int] = ()
    counted_topic: str = "batched"
    sent: Sequence[Sent] = ()
    visible: Sequence[Visible] = ()
    stored: Mapping[str, int] | None = None
    stored_topics: frozenset[str] = frozenset({"kafka-target", "kafka-second"})
    faults: Sequence[Fault] = ()
    progress: Mapping[str, Sequence[float]] = field(default_factory=dict)
    quiet: float = inf


def violations(history: History) -> list[str]:
    """Return all violations as text; empty without any."""
    found = [*_of_calls(history), *_of_outcomes(history), *_of_results_order(history)]
    found += [*_of_counted(history), *_of_transactions(history), *_of_half_order(history), *_of_rows(history)]
    return found + list(_of_standing_still(history))


def standstills(history: History) -> dict[str, Standstill]:
    """Return the worst standstill by kind of fault: a gap counts for each fault that went on when it began."""
    worst: dict[str, Standstill] = {}
    for stream, begin, end in _gaps(history):
        for fault in history.faults:
            if fault.begin < begin + _STOPS_WITHIN_S and begin < fault.end:
                now = Standstill(end - begin, stream)
                worst[fault.kind] = max(now, worst.get(fault.kind, now))
    return worst


def _of_calls(history: History) -> Iterator[str]:
    """Judge calls with the judge of all chaos tests. While faults last, owners are unknown."""
    begin = min((fault.begin for fault in history.faults), default=inf)
    for topic in sorted({record.topic for record in history.fed} | history.calls.keys()):
        produced = {(record.partition, record.offset): record.key for record in history.fed if record.topic == topic}
        calls = history.calls.get(topic, ())
        doubtful = {call.instance: (begin, inf) for call in calls}
        yield from (f"calls of {topic}: {fault}" for fault in examine(produced, calls, doubtful=doubtful).faults)


def _of_outcomes(history: History) -> Iterator[str]:
    """Name messages without an outcome, or with more outcomes than times that they were fed."""
    fed = Counter((record.topic, record.number) for record in history.fed)
    outcomes = Counter((record.topic, record.number) for record in (*history.results, *history.dead))
    yield from _counts("have no result and no dead letter", (record for record in fed if record not in outcomes))
    yield from _counts(
        "have results or dead letters twice", (record for record, n in outcomes.items() if n > fed[record] > 0)
    )
    yield from _counts("have a result and were never fed", (record for record in outcomes if record not in fed))


def _of_results_order(history: History) -> Iterator[str]:
    """Name results that stand before the result of an earlier message of their key."""
    twice = {record for record, n in Counter((record.topic, record.number) for record in history.fed).items() if n > 1}
    yield from _counts(
        "have results out of order",
        _descents(
            (record.topic + record.key, record.number)
            for record in history.results
            if (record.topic, record.number) not in twice
        ),
    )


def _of_counted(history: History) -> Iterator[str]:
    fed = Counter(record.number for record in history.fed if record.topic == history.counted_topic)
    counted = Counter(history.counted)
    yield from _counts("are not counted in PostgreSQL", (n for n in fed if counted[n] < fed[n]))
    yield from _counts("are counted twice in PostgreSQL", (n for n in counted if counted[n] > fed[n]))


def _of_transactions(history: History) -> Iterator[str]:
    sent = {record.name: record for record in history.sent}
    seen = Counter((record.name, record.part) for record in history.visible)
    missing = [(name, part) for name, record in sent.items() for part in range(record.parts) if not seen[name, part]]
    names = {record.name for record in history.visible}
    yield from _counts("committed and are not visible", (record for record in missing if record[0] not in names))
    yield from _counts("are torn: parts of theirs are missing", (record for record in missing if record[0] in names))
    yield from _counts("are visible more than once", (record for record, n in seen.items() if n > 1))
    yield from _counts("are visible and never committed", (name for name in sorted(names) if name not in sent))
    # The clock of a file store is that of its process, which jumps.
    due = {record.name: record.due_s for record in history.sent if record.due_s is not None and record.store != "file"}
    yield from _counts(
        "are visible before their time",
        (record.name for record in history.visible if record.appended_s < due.get(record.name, -inf) - CLOCK_SLACK_S),
    )


def _of_half_order(history: History) -> Iterator[str]:
    yield from _counts(
        "are visible out of the order of their halves",
        _descents(
            (f"{record.topic} {record.key}", record.number) for record in history.visible if ".half." in record.key
        ),
    )


def _of_rows(history: History) -> Iterator[str]:
    if history.stored is None:
        return
    wanted = {f"{record.name}/{record.part}" for record in history.visible if record.topic in history.stored_topics}
    yield from _counts("are visible and Spark has no row of them", sorted(wanted - history.stored.keys()))
    yield from _counts("have a row that nobody can see", sorted(history.stored.keys() - wanted))
    yield from _counts("are stored more than once by Spark", (record for record, n in history.stored.items() if n != 1))


def _of_standing_still(history: History) -> Iterator[str]:
    """Name gaps that go on for too long after the last of the faults in them had ended."""
    for stream, begin, end in _gaps(history):
        during = [fault.end for fault in history.faults if fault.begin < end and begin < fault.end]
        since = min(end, max([begin, *during]))
        if end - since > LONGEST_S:
            yield f"{stream} stood still for {end - since:.0f} s after all faults had ended"


def _gaps(history: History) -> Iterator[tuple[str, float, float]]:
    for stream, times in history.progress.items():
        # Before its first event a stream has not begun. Once all is quiet it goes on until its work is done.
        ends_early = bool(times) and max(times) < history.quiet < inf
        ordered = sorted([*times, history.quiet] if ends_early else times)
        yield from ((stream, begin, end) for begin, end in itertools.pairwise(ordered) if begin < history.quiet)


def _descents(numbered: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Return the items that come after a greater number of their line."""
    highest: dict[str, int] = defaultdict(lambda: -1)
    for line, number in numbered:
        if number < highest[line]:
            yield line, number
        highest[line] = max(highest[line], number)


def _counts(what: str, found: Iterable[object]) -> Iterator[str]:
    named = list(found)
    if named:
        yield f"{len(named)} {what}, as {', '.join(map(str, named[:3]))}"
