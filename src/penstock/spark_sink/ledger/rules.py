"""The rules of all ledgers: which rows of a micro-batch are stored, left out or refused.

A ledger has an entry for each query name, target, topic and partition: the offsets that Spark planned for the last
batch, and the ids of that batch. All decisions are here, without Spark and without a database. The plan of a batch is
an entry, too: the ledger has it once the batch is stored.

A batch ends at its planned end, not at its last row: a filter that drops rows still moves the ledger. If the plan is
unknown (a frame from no stream), `start` is None and `end` follows the last row. Then a gap cannot be detected, because
filtered and missing rows look alike; all other rules apply.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from penstock.errors import SinkError
from penstock.spark_sink.source.plan import Offsets, TopicPartition

#: The place of the next batch number, for queries whose rows come from no messages: an offset of an impossible topic.
BATCHES: TopicPartition = ("(batches)", 0)

_log = logging.getLogger("penstock.spark_sink")


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The last batch of a partition in the ledger of one query and target; or the plan of a batch to store.

    Attributes:
        end: the next offset.
        start: the planned start of the batch. None if the plan was unknown, as in ledgers of earlier versions.
        topic_id: id of the topic; None if unknown.
        query_id: Spark's id of the query, which survives restarts with a checkpoint. None if unknown, or if the entry
            was written at a query's start and no batch was stored since.
        batch_id: Spark's number of the batch; None as `query_id`.
    """

    end: int
    start: int | None = None
    topic_id: str | None = None
    query_id: str | None = None
    batch_id: int | None = None

    def is_of_query(self, other: LedgerEntry) -> bool:
        """Tell whether both belong to one query with one checkpoint."""
        return self.query_id is not None and self.query_id == other.query_id


@dataclass(frozen=True, slots=True)
class Span:
    """The lowest and the highest offset of one partition in a batch."""

    first: int
    last: int


@dataclass(slots=True)
class OffsetStatistics:
    """The content of a batch: its rows, the offsets of each partition, and the number of rows applied before."""

    rows: int = 0
    spans: dict[TopicPartition, Span] = field(default_factory=dict)
    applied: Counter[TopicPartition] = field(default_factory=Counter)

    def add(self, other: OffsetStatistics) -> None:
        """Add the statistics of another task."""
        self.rows += other.rows
        self.applied += other.applied
        for part, span in other.spans.items():
            held = self.spans.get(part, span)
            self.spans[part] = Span(min(held.first, span.first), max(held.last, span.last))


class Rule(Enum):
    """The relation of a batch to the ledger, for one partition."""

    #: The ledger has no entry of the partition: all rows are applied, and the planned start is recorded.
    FIRST = "first"
    #: The batch starts at the ledger's end.
    NEXT = "next"
    #: The ledger ends within the batch: rows below it are left out, the others are applied.
    OVERLAP = "overlap"
    #: The ledger has the whole batch, stored by any run: nothing changes.
    REPLAY = "replay"
    #: The batch starts above the ledger's end: refused.
    GAP = "gap"
    #: The source went back because the topic was recreated: the ledger goes back with it.
    RECREATED = "recreated"
    #: The source went back, but not from the ledger's end: another copy of the query is ahead. Refused.
    ANOTHER_LOG = "another log"
    #: The plan is unknown: rows below the ledger are left out, or refused if they are late.
    UNPLANNED = "unplanned"


#: The rules in order: the first whose condition holds counts. `held` is the ledger's entry, `batch` the batch's plan.
RULES: Sequence[tuple[Rule, Callable[[LedgerEntry, LedgerEntry], bool]]] = (
    (Rule.UNPLANNED, lambda _held, batch: batch.start is None),
    # Before rules that compare offsets: a batch in which the source went back lies on both sides of the ledger's end.
    (Rule.REPLAY, lambda held, batch: batch.is_of_query(held) and _same_plan(held, batch)),
    (Rule.RECREATED, lambda held, batch: _goes_back(batch) and batch.start == held.end),
    (Rule.ANOTHER_LOG, lambda held, batch: _goes_back(batch) and _below(held, batch)),
    # An entry without a start ends at its last row: rows that a filter dropped after it are no gap.
    (Rule.GAP, lambda held, batch: not _below(held, batch) and batch.start != held.end and held.start is not None),
    (Rule.NEXT, lambda held, batch: not _below(held, batch)),
    (Rule.REPLAY, lambda held, batch: batch.end <= held.end),
    (Rule.OVERLAP, lambda _held, _batch: True),
)


def _same_plan(held: LedgerEntry, batch: LedgerEntry) -> bool:
    # The number alone is not enough: a checkpoint restored from a backup uses its batch numbers again.
    return (held.batch_id, held.start, held.end) == (batch.batch_id, batch.start, batch.end)


def _goes_back(batch: LedgerEntry) -> bool:
    return batch.start is not None and batch.end < batch.start


def _below(held: LedgerEntry, batch: LedgerEntry) -> bool:
    return batch.start is not None and batch.start < held.end


def rule_of(held: LedgerEntry | None, batch: LedgerEntry) -> Rule:
    """Return the rule for a batch, given the ledger's entry of a partition."""
    if held is None:
        return Rule.FIRST
    return next(rule for rule, holds in RULES if holds(held, batch))


def unknown(
    ledger: Mapping[TopicPartition, LedgerEntry], begin: Mapping[TopicPartition, LedgerEntry]
) -> dict[TopicPartition, LedgerEntry]:
    """Return the entries of a query's beginning that the ledger lacks, or has of a topic with another id."""
    ids = {part: {entry.topic_id, ledger[part].topic_id} - {None} for part, entry in begin.items() if part in ledger}
    return {part: entry for part, entry in begin.items() if part not in ids or len(ids[part]) > 1}


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch of a sink. Picklable.

    Attributes:
        target: the sink's target, as errors name it.
        batch_id: Spark's number of the batch.
        query_id: Spark's id of its query; None if unknown.
        planned: for each partition the first offset, and the one after the last (-2: recreated); empty if unknown.
        reset: the command that changes the ledger on purpose, without its arguments.
    """

    target: str
    batch_id: int
    query_id: str | None = None
    planned: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    reset: str = "penstock sink reset NAME"

    @property
    def recreated(self) -> set[str]:
        """The topics of which a partition goes back: entries that the ledger has of them may be of a former topic."""
        return {topic for (topic, _), (start, end) in self.planned.items() if end < start}

    def applied_below(self, ledger: Mapping[TopicPartition, LedgerEntry]) -> Offsets:
        """Return for each partition the offset below which rows were applied before; missing: no row was.

        Raises `SinkError` for a partition whose rows cannot be applied at all, before any of them is.
        """
        rules = {part: self._accepted(part, ledger, self._plan(part, None)) for part in ledger}
        return {part: held.end for part, held in ledger.items() if rules[part] is not Rule.RECREATED}

    def entries_after(
        self, ledger: Mapping[TopicPartition, LedgerEntry], spans: Mapping[TopicPartition, Span]
    ) -> dict[TopicPartition, LedgerEntry]:
        """Return the entries that change when the batch, with these spans, is stored.

        Raises `SinkError` for rows of an earlier batch, and as `applied_below`.
        """
        changed: dict[TopicPartition, LedgerEntry] = {}
        taken_for_stored, recreated = [], self.recreated
        ids = [(topic, entry.topic_id) for (topic, _), entry in ledger.items() if topic not in recreated]
        for part in sorted(self.planned.keys() | spans.keys()):
            held, batch, span = ledger.get(part), self._plan(part, spans.get(part)), spans.get(part)
            rule = self._accepted(part, ledger, batch)
            if span is not None:
                self._refuse_late(part, held, batch, span)
            if held is None:
                # A partition that was added to a topic belongs to the same topic as the others.
                own = {topic_id for topic, topic_id in ids if topic == part[0]}
                changed[part] = replace(batch, topic_id=own.pop() if len(own) == 1 else None)
            elif rule is Rule.RECREATED or (rule is Rule.NEXT and part[0] in recreated):
                changed[part] = batch
            elif batch.end > held.end or (rule is Rule.NEXT and held.start is None):
                changed[part] = replace(batch, topic_id=held.topic_id)
            if held is None and self.batch_id > 0 and batch.start:
                taken_for_stored.append(f"{part[0]}:{part[1]} below offset {batch.start}")
        if taken_for_stored:
            known = ", ".join(taken_for_stored)
            _log.warning("batch %d: the ledger of %s takes for stored: %s", self.batch_id, self.target, known)
        return changed

    def moves(self, ledger: Mapping[TopicPartition, LedgerEntry]) -> set[TopicPartition]:
        """Return the planned partitions whose entry may change, even without rows."""
        return {
            part
            for part, (start, end) in self.planned.items()
            if start != end or part not in ledger or ledger[part].start is None
        }

    def _plan(self, part: TopicPartition, span: Span | None) -> LedgerEntry:
        start, end = self.planned.get(part, (None, 0 if span is None else span.last + 1))
        return LedgerEntry(max(0, end), start, None, self.query_id, self.batch_id)

    def _accepted(self, part: TopicPartition, ledger: Mapping[TopicPartition, LedgerEntry], batch: LedgerEntry) -> Rule:
        """Return the rule of a partition, or raise `SinkError` if it refuses the batch."""
        held = ledger.get(part)
        rule = rule_of(held, batch)
        if held is not None and part == BATCHES and part in self.planned:
            self._refuse_other_results(held, batch, rule)
        if held is None or rule not in {Rule.GAP, Rule.ANOTHER_LOG}:
            return rule
        place = f"{part[0]}:{part[1]}"
        if rule is Rule.GAP:
            starts = [
                f"{other[0]}:{other[1]}@{self.planned[other][0]}"
                for other in sorted(self.planned)
                if rule_of(ledger.get(other), self._plan(other, None)) is Rule.GAP
            ]
            raise SinkError(
                f"batch {self.batch_id} starts at offset {batch.start} of {place}, but {self.target} holds only what "
                f"lies below {held.end}: offsets {held.end} to {(batch.start or 0) - 1} would be missing, for example "
                "because the target was restored from a backup; to store them as well, start the query by start_sink "
                "with a new checkpoint_location: it begins where the ledger ends, if Kafka still holds them; to go on "
                f"without them, run `{self.reset} --to {','.join(starts)}`"
            )
        raise SinkError(
            f"batch {self.batch_id} goes back from offset {batch.start} of {place} to {batch.end}, as the topic was "
            f"created again or its log was cut, but {self.target} was filled up to {held.end} by another copy of the "
            f"query; stop one, run `{self.reset} --forget --topic {part[0]}`, and start the other with a new checkpoint"
        )

    def _refuse_other_results(self, held: LedgerEntry, batch: LedgerEntry, rule: Rule) -> None:
        """Raise `SinkError` for a numbered batch that is neither the next one nor the last one again."""
        if not batch.is_of_query(held) or (rule is not Rule.NEXT and batch.end != held.end):
            raise SinkError(
                f"batch {self.batch_id} of the checkpoint with the id {batch.query_id} does not follow what "
                f"{self.target} holds, which ends with batch {held.end - 1} of the checkpoint {held.query_id}; totals "
                "have no offsets, so only their own checkpoint continues them: start the query with that one; if it is "
                "lost, or it or the target came back from a backup, empty the target (or leave it, where the query "
                f"computes all rows again and a key replaces them) and run `{self.reset} --forget`"
            )

    def _refuse_late(self, part: TopicPartition, held: LedgerEntry | None, batch: LedgerEntry, span: Span) -> None:
        """Raise `SinkError` for rows of an earlier batch, held back by a stateful operator: the ledger is past them."""
        offset, remedy = span.first, 'keep it out of the query; SqlSink with mode="batch" takes totals'
        if batch.start is not None:
            if span.first >= batch.start:
                offset = span.last
            is_late, where = not batch.start <= offset < batch.end, f"it was planned from {batch.start} to {batch.end}"
        elif held is not None:
            is_later = (batch.batch_id or 0) > (-1 if held.batch_id is None else held.batch_id)
            is_late = offset < held.end and batch.is_of_query(held) and is_later
            where = f"batch {held.batch_id} has stored what lies below {held.end}"
            remedy += (
                f"; or the topic was created again: run `{self.reset} --forget --topic {part[0]}`; or the checkpoint "
                "came back from a backup: give the query a new one"
            )
        else:
            return
        if is_late:
            raise SinkError(
                f"batch {self.batch_id} for {self.target} holds a row of {part[0]}:{part[1]}@{offset}, but "
                f"{where}: an operator with state (a window, a join of streams, dropDuplicates) holds rows back, or "
                f"the frame has rows of another source: {remedy}"
            )


def warn_left_out(batch_id: int, target: str, statistics: OffsetStatistics) -> None:
    """Warn about the rows of a batch that are left out because they were applied before."""
    if statistics.applied:
        _log.warning(
            "batch %d: %d of %d rows for %s were applied before and are left out (%s)",
            batch_id,
            sum(statistics.applied.values()),
            statistics.rows,
            target,
            ", ".join(f"{topic}:{partition}" for topic, partition in sorted(statistics.applied)),
        )
