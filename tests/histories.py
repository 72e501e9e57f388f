"""Judges the handling of messages: compares histories of handler calls and commits with the produced messages.

Pure: no Kafka, no clock. All times are seconds on one clock that all processes of a machine share. `examine` names
every fault it finds; a test asserts that there is none. What counts as a fault:

- lost: produced, and no call of it ever ended.
- out of order (I2), per key: a call that begins before all former messages of its key were done once (`1 3 2`); a call
  that leaves messages out, unless another member did them meanwhile; a call that goes back behind the group's committed
  offset or, if commits are unknown, behind the place where a former redelivery began. `1 2 1 2 3` is legal.
- overlapping (I1): two calls of one key at once in one process, or in two while ownership was clear.
- an early commit (I3): it tells of a message as done that was not. A regression: a commit below a former one.

Ownership is taken to be clear between all instances, so that their calls make one sequence, until an instance may have
lost its partitions without knowing: a suspended process, a handler that outlives its revocation. The calls of such a
time are judged separately from those of the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

#: Partition and offset.
Place = tuple[int, int]
#: From when until when.
Span = tuple[float, float]

#: Seconds of difference between the broker's clock in a commit and the processes' clock.
CLOCK_SLACK_S = 0.1

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a handler.

    Attributes:
        instance: the process; a restarted one has a new name.
        key: the message's key.
        partition: its partition.
        offset: its offset.
        start: when the call began.
        end: when it ended, or None if the process ended first.
    """

    instance: str
    key: str
    partition: int
    offset: int
    start: float
    end: float | None

    def __str__(self) -> str:
        """Name the call for a report."""
        ended = "cut off" if self.end is None else f"{self.end:.3f}"
        return f"{self.key}@{self.partition}:{self.offset} by {self.instance} ({self.start:.3f} to {ended})"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of the group.

    Attributes:
        partition: the partition.
        offset: all below it are committed as done.
        time: when the broker took it.
        done: offsets above it that are committed as done, too.
    """

    partition: int
    offset: int
    time: float
    done: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What `examine` found. All but `repeated` are faults; each text names one.

    Attributes:
        lost: messages without a call that ended.
        unknown: calls of messages that were never produced.
        repeated: how often messages were handled beyond the first time.
        out_of_order: calls that break the order of their key.
        overlaps: pairs of calls of a key at the same time.
        early_commits: commits of what was not done.
        regressions: commits below a former one.
    """

    lost: tuple[Place, ...] = ()
    unknown: tuple[str, ...] = ()
    repeated: Mapping[Place, int] = field(default_factory=dict)
    out_of_order: tuple[str, ...] = ()
    overlaps: tuple[str, ...] = ()
    early_commits: tuple[str, ...] = ()
    regressions: tuple[str, ...] = ()

    @property
    def repeats(self) -> int:
        """Calls that would not have been needed."""
        return sum(self.repeated.values())

    @property
    def faults(self) -> list[str]:
        """All faults in words, the first few of each kind; empty when there is none."""
        kinds: dict[str, Sequence[object]] = {
            "lost": self.lost,
            "never produced": self.unknown,
            "out of order": self.out_of_order,
            "overlapping": self.overlaps,
            "committed early": self.early_commits,
            "committed backwards": self.regressions,
        }
        return [f"{len(found)} {kind}: {'; '.join(map(str, found[:5]))}" for kind, found in kinds.items() if found]


def examine(
    produced: Mapping[Place, str],
    calls: Iterable[Call],
    commits: Sequence[Commit] = (),
    *,
    doubtful: Mapping[str, Span] | None = None,
    may_resend: bool = False,
) -> Report:
    """Judge a history.

    Args:
        produced: the key of each message that was produced and is visible.
        calls: all handler calls of all instances, in any order.
        commits: all commits of the group, in the order in which the broker took them; none where they are not known.
        doubtful: from when until when an instance may not know that it lost its partitions. What of its calls lies in
            that time is judged separately from the calls of the others.
        may_resend: whether a commit that was there before may come again behind a later one. The client library sends
            a commit that is not answered up to twice again, which may come behind the next one.

    Returns:
        The faults, and what was repeated.
    """
    ordered = sorted(calls, key=lambda call: call.start)
    known = [call for call in ordered if (call.partition, call.offset) in produced]
    first_ends = _first_ends(known)
    of_key = _by_key(known)
    placed = _offsets_by_key(produced)
    committed = _by_time(commits)
    out_of_order: list[str] = []
    overlaps: list[str] = []
    for (partition, key), mine in of_key.items():
        positions = {offset: position for position, offset in enumerate(placed[partition, key])}
        former_done = _all_former_done(placed[partition, key], partition, first_ends)
        out_of_order += [
            f"{call} began before a former message of its key was done"
            for call in mine
            if former_done[positions[call.offset]] > call.start
        ]
        sequences = _sequences(mine, doubtful or {})
        for sequence in sequences.values():
            others = [call for name in sequences for call in sequences[name] if sequences[name] is not sequence]
            out_of_order += _missteps(sequence, positions, others, restarts_may_fall=bool(commits))
        out_of_order += _below_commits(sequences.get(None, []), committed)
        overlaps += _overlaps(mine, sequences.get(None, []))
    counts = Counter((call.partition, call.offset) for call in known)
    return Report(
        lost=tuple(sorted(place for place in produced if place not in first_ends)),
        unknown=tuple(str(call) for call in ordered if (call.partition, call.offset) not in produced),
        repeated={place: count - 1 for place, count in sorted(counts.items()) if count > 1},
        out_of_order=tuple(out_of_order),
        overlaps=tuple(overlaps),
        early_commits=tuple(_early_commits(commits, produced, first_ends)),
        regressions=tuple(_regressions(commits, may_resend=may_resend)),
    )


def _first_ends(calls: Iterable[Call]) -> dict[Place, float]:
    """Return when each message was done for the first time."""
    found: dict[Place, float] = {}
    for call in calls:
        if call.end is not None:
            place = call.partition, call.offset
            found[place] = min(call.end, found.get(place, _NEVER))
    return found


def _by_key(calls: Iterable[Call]) -> dict[tuple[int, str], list[Call]]:
    found: dict[tuple[int, str], list[Call]] = defaultdict(list)
    for call in calls:
        found[call.partition, call.key].append(call)
    return found


def _offsets_by_key(produced: Mapping[Place, str]) -> dict[tuple[int, str], list[int]]:
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for (partition, offset), key in sorted(produced.items()):
        found[partition, key].append(offset)
    return found


def _all_former_done(offsets: Sequence[int], partition: int, first_ends: Mapping[Place, float]) -> list[float]:
    """Return for each position of a key when all before it were done once."""
    ends = [first_ends.get((partition, offset), _NEVER) for offset in offsets]
    return [-_NEVER, *accumulate(ends[:-1], max)]


def _sequences(calls: Iterable[Call], doubtful: Mapping[str, Span]) -> dict[str | None, list[Call]]:
    """Part the calls of a key: under None those made while ownership was clear, the others by instance."""
    found: dict[str | None, list[Call]] = defaultdict(list)
    for call in calls:
        begin, end = doubtful.get(call.instance, (_NEVER, _NEVER))
        found[call.instance if call.start < end and _end(call) > begin else None].append(call)
    return found


def _missteps(
    sequence: Sequence[Call], positions: Mapping[int, int], others: Sequence[Call], *, restarts_may_fall: bool
) -> Iterator[str]:
    """Name the calls of one sequence that neither follow the former nor restart where they may."""
    at_offset = {position: offset for offset, position in positions.items()}
    last, restart = -1, 0
    for call in sequence:
        position = positions[call.offset]
        if position > last + 1:
            done = {other.offset for other in others if other.end is not None and other.end <= call.start}
            skipped = [at_offset[one] for one in range(last + 1, position) if at_offset[one] not in done]
            if skipped:
                yield f"{call} left {skipped[0]} out"
        elif position <= last:
            if position < restart and not restarts_may_fall:
                yield f"{call} went back behind {at_offset[restart]}, from where its key was delivered again before"
            restart = max(position, restart)
        last = position


def _below_commits(sequence: Iterable[Call], committed: Mapping[int, _Committed]) -> Iterator[str]:
    """Name the calls that began although their message was committed as done."""
    for call in sequence:
        known = committed.get(call.partition)
        offset = -1 if known is None else known.at(call.start - CLOCK_SLACK_S)
        if offset > call.offset:
            yield f"{call} went back behind {offset}, which was committed before"


class _Committed:
    """The highest committed offset of a partition at any time."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._offsets: list[int] = []

    def add(self, commit: Commit) -> None:
        self._times.append(commit.time)
        self._offsets.append(max(commit.offset, self._offsets[-1] if self._offsets else -1))

    def at(self, time: float) -> int:
        place = bisect_left(self._times, time)
        return self._offsets[place - 1] if place else -1


def _by_time(commits: Iterable[Commit]) -> dict[int, _Committed]:
    found: dict[int, _Committed] = defaultdict(_Committed)
    for commit in sorted(commits, key=lambda one: one.time):
        found[commit.partition].add(commit)
    return found


def _overlaps(calls: Sequence[Call], clear: Sequence[Call]) -> Iterator[str]:
    """Name pairs of calls of a key at once: in one process, and between processes while ownership was clear."""
    latest: dict[str, Call] = {}
    for call in calls:
        former = latest.get(call.instance)
        if former is not None and _end(former) > call.start:
            yield f"{call} and {former}"
        if former is None or _end(call) >= _end(former):
            latest[call.instance] = call
    across: Call | None = None
    for call in clear:
        # A call ends with its process, at an unknown time.
        if call.end is None:
            continue
        if across is not None and across.instance != call.instance and _end(across) > call.start:
            yield f"{call} and {across}"
        if across is None or call.end >= _end(across):
            across = call


def _end(call: Call) -> float:
    return _NEVER if call.end is None else call.end


def _early_commits(
    commits: Iterable[Commit], produced: Mapping[Place, str], first_ends: Mapping[Place, float]
) -> Iterator[str]:
    """Name the commits that report an unfinished message as done. Each message is checked in its first commit."""
    open_offsets: dict[int, list[int]] = defaultdict(list)
    for partition, offset in sorted(produced, reverse=True):
        open_offsets[partition].append(offset)
    for commit in commits:
        done_offsets = {offset for done in commit.done for offset in done if (commit.partition, offset) in produced}
        mine = open_offsets[commit.partition]
        while mine and mine[-1] < commit.offset:
            done_offsets.add(mine.pop())
        early = [
            offset
            for offset in sorted(done_offsets)
            if first_ends.get((commit.partition, offset), _NEVER) > commit.time + CLOCK_SLACK_S
        ]
        if early:
            yield f"{commit.partition}:{commit.offset} at {commit.time:.3f} although {early[0]} was not done"


def _regressions(commits: Iterable[Commit], *, may_resend: bool) -> Iterator[str]:
    highest: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for commit in commits:
        former = highest.get(commit.partition, -1)
        place = commit.partition, commit.offset
        if commit.offset < former and not (may_resend and place in seen):
            yield f"{commit.partition}: {commit.offset} at {commit.time:.3f} after {former}"
        highest[commit.partition] = max(former, commit.offset)
        seen.add(place)


__all__ = ["CLOCK_SLACK_S", "Call", "Commit", "Place", "Report", "Span", "examine"]
