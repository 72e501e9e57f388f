"""Rows that a table refuses: how they are known, by their values or by the database's answer, and how they are found.

A row is named by the place of its message and by what was refused, never by its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from penstock.spark_sink.sinks.sql.databases.errors import concerns_a_row, facts_of

#: Days from 1970 to the first and the last day of the years 1 to 9999, and microseconds of a day.
_FIRST_DAY, _LAST_DAY = ((day - date(1970, 1, 1)).days for day in (date.min, date.max))
_DAY_US = 24 * 60 * 60 * 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class Rejected:
    """A message of which a row was refused.

    Attributes:
        topic: its topic.
        partition: its partition.
        offset: its offset.
        reason: kind of the refusal, with its SQLSTATE and column where they are known.
    """

    topic: str
    partition: int
    offset: int
    reason: str

    @property
    def place(self) -> tuple[str, int, int]:
        """Topic, partition and offset."""
        return self.topic, self.partition, self.offset

    def __str__(self) -> str:
        """Return place and reason."""
        return f"{self.topic}[{self.partition}] offset {self.offset} ({self.reason})"


def in_halves(
    connection: sa.Connection,
    count: int,
    apply: Callable[[int, int], None],
    refused: Callable[[int, str], bool],
) -> None:
    """Apply rows 1 to `count` in their order, in pieces as large as the database takes them.

    Each piece, from its first number to its last, is a savepoint in the transaction that is open. `refused` gets the
    number of a row that is refused for its own sake, and the reason; it tells whether to go on.
    """
    pieces = [(1, count)] if count else []
    while pieces:
        first, last = pieces.pop()
        try:
            with connection.begin_nested():
                apply(first, last)
        except sa.exc.SQLAlchemyError as error:
            if not concerns_a_row(error):
                raise
            if first < last:
                middle = (first + last) // 2
                pieces += [(middle + 1, last), (first, middle)]
            elif not refused(first, ", ".join(facts_of(error))):
                return


@dataclass(frozen=True, slots=True)
class RowValidator:
    """Which values of a frame no table of the database can hold. Picklable.

    Columns of `never_null` identify a row: databases hold any two NULL for different, so rows would pile up. In those
    of `no_nan` NaN is refused, which SQLite turns into NULL; with `no_infinity`, as in MySQL, what is infinite; and
    with `no_nul`, as in PostgreSQL, a text with a NUL character.
    """

    never_null: Sequence[str]
    no_nan: Sequence[str] = ()
    no_infinity: bool = False
    no_nul: bool = False

    def split(self, rows: pa.Table) -> tuple[pa.Table, list[Rejected]]:
        """Return the rows that may be stored, and what is wrong with each of the others."""
        reasons: dict[int, str] = {}
        for name in rows.schema.names:
            for reason, found in self._refused(name, rows[name].combine_chunks()):
                for index in found:
                    reasons.setdefault(index, f"column {name} {reason}")
        if not reasons:
            return rows, []
        refused = sorted(reasons)
        places = rows.select(["topic", "partition", "offset"]).take(pa.array(refused, pa.int64())).to_pylist()
        kept = pa.array([index not in reasons for index in range(rows.num_rows)], pa.bool_())
        return rows.filter(kept), [
            Rejected(**place, reason=reasons[index]) for place, index in zip(places, refused, strict=True)
        ]

    def _refused(self, name: str, column: pa.Array) -> Iterable[tuple[str, list[int]]]:
        kind = column.type
        if name in self.never_null and column.null_count:
            yield "is part of the key and is NULL", _where(column.is_null())
        if name in self.no_nan and pa.types.is_floating(kind):
            yield "is NaN, which the database does not know", _where(pc.is_nan(column))
        if self.no_infinity and pa.types.is_floating(kind):
            yield "is infinite, which the database does not know", _where(pc.is_inf(column))
        if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
            yield "is out of the years 1 to 9999", _out_of_calendar(column)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            wrong = _not_utf8(column)
            if wrong:
                yield "is not UTF-8", wrong
            elif self.no_nul:
                yield "holds a NUL character", _where(pc.match_substring(column, "\0"))


def _where(condition: pa.Array) -> list[int]:
    found: list[int] = pc.indices_nonzero(condition).to_pylist()
    return found


def _out_of_calendar(column: pa.Array) -> list[int]:
    """Return where a time lies out of the years that Spark, and texts of Arrow, have."""
    kind, day = (pa.int32(), 1) if pa.types.is_date32(column.type) else (pa.int64(), _DAY_US)
    numbers = column.view(kind)
    return _where(pc.or_(pc.less(numbers, _FIRST_DAY * day), pc.greater_equal(numbers, (_LAST_DAY + 1) * day)))


def _not_utf8(column: pa.Array) -> list[int]:
    """Return where a text is not UTF-8: Spark makes texts of any bytes that are cast to one."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        wide = pa.types.is_large_string(column.type)
        values = column.view(pa.large_binary() if wide else pa.binary()).to_pylist()
        return [index for index, value in enumerate(values) if value is not None and not _is_utf8(value)]
    return []


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
