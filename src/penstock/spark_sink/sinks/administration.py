"""Operations on ledgers for `penstock sink`: list them and change them on purpose.

A changed entry begins and ends at its offset, and belongs to no batch, as at the first start of a query. So by the
rules a batch that starts there continues, one that starts above it is refused, and rows below it are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.errors import ConfigurationError, PenstockError
from penstock.group_offsets.targets import topic_choice
from penstock.places import place_of, place_text
from penstock.spark_sink.ledger.rules import BATCHES, LedgerEntry
from penstock.spark_sink.sinks.sink import LedgerSink
from penstock.spark_sink.source.plan import Offsets, TopicPartition


@dataclass(frozen=True, slots=True)
class QueryLedger:
    """The entries of a query in one target's ledger; a snapshot."""

    query: str
    target: str
    entries: Mapping[TopicPartition, LedgerEntry]
    sink: LedgerSink

    @property
    def last(self) -> LedgerEntry | None:
        """The newest entry that a batch wrote, or None."""
        written = [entry for entry in self.entries.values() if entry.batch_id is not None]
        return max(written, key=lambda entry: entry.batch_id or 0, default=None)


def queries(sinks: Mapping[str, LedgerSink]) -> list[QueryLedger]:
    """Return the content of ledgers, given sinks by target, ordered by query and target."""
    found = [
        QueryLedger(query, target, entries, sink)
        for target, sink in sinks.items()
        for query, entries in sink.ledger().items()
        if entries
    ]
    return sorted(found, key=lambda held: (held.query, held.target))


def of_query(found: Iterable[QueryLedger], query: str) -> list[QueryLedger]:
    """Return the ledgers of a query, or raise `PenstockError` if there are none."""
    names = sorted({held.query for held in found})
    if query not in names:
        known = f"it has {', '.join(map(repr, names))}" if names else "it is empty"
        raise PenstockError(f"the ledger has no query {query!r}: {known}")
    return [held for held in found if held.query == query]


def chosen(found: Iterable[QueryLedger], topics: Sequence[str]) -> list[QueryLedger]:
    """Return only the entries of topics, or of `TOPIC:PARTITIONS`; default: all. `PenstockError` if there are none."""
    choices = [topic_choice(text) for text in topics]

    def is_chosen(topic: str, partition: int) -> bool:
        return not choices or any(
            choice.topic == topic and (choice.partitions is None or partition in choice.partitions)
            for choice in choices
        )

    kept = [
        replace(held, entries={part: entry for part, entry in held.entries.items() if is_chosen(*part)})
        for held in found
    ]
    if not any(held.entries for held in kept):
        raise PenstockError(
            f"the ledger has no entry of {', '.join(topics)}; see those it has with `penstock sink show`"
        )
    return kept


def positions(text: str, parts: Collection[TopicPartition]) -> Offsets:
    """Return the next offset of each partition in an option `--to`, such as `orders:0@4711,orders:1@4712`.

    Raises `ConfigurationError` for a wrong text and for partitions that are not in `parts`.
    """
    if BATCHES in parts:
        raise ConfigurationError('the ledger has batches by number, as of mode="batch", and no offsets; give --forget')
    offsets = {(topic, partition): offset for topic, partition, offset in map(place_of, text.split(","))}
    if unknown := [place_text(*part) for part in sorted(offsets.keys() - set(parts))]:
        raise ConfigurationError(f"--to names {', '.join(unknown)}, of which the ledger has no entry; leave it out")
    return offsets


@dataclass(frozen=True, slots=True)
class Change:
    """An entry before and after a change; None: it is removed."""

    target: str
    part: TopicPartition
    before: LedgerEntry
    after: LedgerEntry | None

    @property
    def again(self) -> int:
        """Number of stored offsets that will be stored again."""
        return 0 if self.after is None else max(0, self.before.end - self.after.end)

    @property
    def left_out(self) -> int:
        """Number of offsets that are not stored and never will be."""
        return 0 if self.after is None else max(0, self.after.end - self.before.end)


def changes(found: Iterable[QueryLedger], to: Offsets | None) -> list[Change]:
    """Return the changes that set entries to these offsets, or remove all. An entry keeps its topic id."""
    made = []
    for held in found:
        for part, before in sorted(held.entries.items()):
            if to is None:
                made.append(Change(held.target, part, before, None))
            elif part in to:
                made.append(Change(held.target, part, before, LedgerEntry(to[part], to[part], before.topic_id)))
    return made


def write(found: Iterable[QueryLedger], made: Sequence[Change]) -> None:
    """Apply changes, target by target."""
    for held in found:
        changed = {change.part: change.after for change in made if change.target == held.target}
        if changed:
            held.sink.write_ledger(held.query, changed)


def rename(found: Iterable[QueryLedger], old: str, new: str, *, dry_run: bool) -> list[QueryLedger]:
    """Move the entries of a query to a new name, which must have none (`PenstockError`). Returns the moved ledgers.

    They are written under the new name first. A failure in between leaves both; the old name can be removed then.
    """
    moving = of_query(found, old)
    if not new:
        raise ConfigurationError("the new name is empty; name the query")
    if any(held.sink.ledger().get(new) for held in moving):
        raise PenstockError(
            f"the ledger has entries of {new!r}, and those of {old!r} would replace them; choose another name, or "
            f"remove them by `penstock sink reset {new} --forget`"
        )
    for held in () if dry_run else moving:
        held.sink.write_ledger(new, held.entries)
        held.sink.write_ledger(old, dict.fromkeys(held.entries))
    return moving
