"""Events of a query, for every sink: each function plays one on a sink and asserts the stored rows.

What they assert is I9: a sink's rows are those of a run in which nothing failed, or the sink says that they are not.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isfunction

from sinks_under_test import Place, SinkUnderTest

from penstock.errors import SinkError
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.sinks import administration

ORDERS, OTHERS, PAYMENTS = ("orders", 0), ("orders", 1), ("payments", 0)


class CrashError(Exception):
    """The process has died, as far as the sink can tell."""


@contextmanager
def refused(pattern: str = "", *more: type[Exception]) -> Iterator[None]:
    """Assert that the sink refuses the rows in the block; the failure is an `AssertionError`, unlike pytest's."""
    try:
        yield
    except (SinkError, *more) as error:
        if not re.search(pattern, str(error)):
            raise AssertionError(f"refused with another text: {error}") from error
    else:
        raise AssertionError("the sink took what it had to refuse")


def rows(*offsets: int, of: tuple[str, int] = ORDERS) -> list[Place]:
    """Return rows of one partition."""
    return [(*of, offset) for offset in offsets]


def a_batch_is_repeated_by_a_new_run(sink: SinkUnderTest) -> None:
    """Its rows come in any order, and several of one offset."""
    for run in ("first", "second", "third"):
        sink.store(rows(3, 0, 1, 1, 2), 0, run)

    assert sink.stored() == rows(0, 1, 1, 2, 3)
    assert sink.position(ORDERS, OTHERS) == {ORDERS: 4}


def a_checkpoint_is_lost(sink: SinkUnderTest) -> None:
    for batch in range(3):
        sink.store(rows(*range(3 * batch, 3 * batch + 3)), batch)
    for batch in range(3):  # cut in another way
        sink.store(rows(*range(5 * batch, 5 * batch + 5)), batch, "second", checkpoint="new")

    assert sink.stored() == rows(*range(15))
    assert sink.position(ORDERS) == {ORDERS: 15}


def offsets_have_holes_and_a_batch_has_no_rows(sink: SinkUnderTest) -> None:
    """Of aborted transactions, of compaction, of a filter."""
    sink.store(rows(0, 4))
    sink.store([], 1)
    sink.store(rows(9, 12), 2)
    sink.store(rows(9, 12, 20), 2, "second")

    assert sink.stored() == rows(0, 4, 9, 12, 20)
    assert sink.position(ORDERS) == {ORDERS: 21}


def topics_and_partitions_have_positions_of_their_own(sink: SinkUnderTest) -> None:
    sink.store([*rows(*range(9)), *rows(0, 1, of=OTHERS), *rows(0, of=PAYMENTS)])
    sink.store([*rows(2, of=OTHERS), *rows(1, 2, of=PAYMENTS)], 1)
    sink.store([*rows(2, 3, of=OTHERS), *rows(0, 1, 2, 3, of=PAYMENTS)], 0, "second")

    assert sink.stored() == [*rows(*range(9)), *rows(*range(4), of=OTHERS), *rows(*range(4), of=PAYMENTS)]
    assert sink.position(ORDERS, OTHERS, PAYMENTS) == {ORDERS: 9, OTHERS: 4, PAYMENTS: 4}


def rows_come_below_a_later_batch(sink: SinkUnderTest) -> None:
    """As from an operator that holds rows back. They are refused in every run."""
    sink.store(rows(0, 5))
    for run in ("first", "second"):
        with refused(r"batch 1 for .* holds a row of orders:0@3, but batch 0 has stored what lies below 6"):
            sink.store(rows(3, 6), 1, run)

    assert sink.stored() == rows(0, 5)
    assert sink.position(ORDERS) == {ORDERS: 6}


def a_sink_is_called_twice_in_a_batch(sink: SinkUnderTest) -> None:
    sink.store(rows(0, 5), 7)
    for run in ("first", "second") if sink.takes_retries_for_calls else ():
        if run != "first":
            sink.store(rows(0, 5), 7, run)  # what a restarted query hands over again
        with refused(r"batch 7 was given to .* twice: the rows of its first frame are stored, those of this one are"):
            sink.store(rows(3), 7, run)
    sink.store(rows(6), 8)

    assert sink.stored() == rows(0, 5, 6)


def a_task_is_retried(sink: SinkUnderTest) -> None:
    sink.store_by_two_tries(rows(*range(8)))
    sink.store_by_two_tries(rows(*range(8, 12)), 1)

    assert sink.stored() == rows(*range(12))


def another_copy_is_ahead(sink: SinkUnderTest) -> None:
    """Rows of another query do not count for this one, whose next batch lies below them."""
    sink.store(rows(0, 1, 2, 3), 1, "ahead", checkpoint="another")
    sink.store([*rows(0, 1), *rows(0, of=OTHERS)], 1, "behind")
    sink.store(rows(2, 3, 4), 2, "behind")

    assert sink.stored() == [*rows(*range(5)), *rows(0, of=OTHERS)]


def another_copy_is_behind(sink: SinkUnderTest) -> None:
    """A ledger never goes back."""
    sink.store(rows(*range(9)), 1, "ahead", checkpoint="another")
    sink.store([*rows(0, 1), *rows(0, of=OTHERS)], 0, "behind")
    sink.store(rows(2, 3), 1, "behind")
    sink.store(rows(9), 2, "ahead", checkpoint="another")

    assert sink.stored() == [*rows(*range(10)), *rows(0, of=OTHERS)]
    assert sink.position(ORDERS, OTHERS) == {ORDERS: 10, OTHERS: 1}


def another_copy_commits_in_the_middle_of_a_batch(sink: SinkUnderTest) -> None:
    rival = threading.Thread(target=sink.store, args=(rows(*range(6)), 0, "rival"), kwargs={"checkpoint": "another"})
    begun: list[bool] = []

    def meet() -> None:
        begun.append(True)
        rival.start()
        if not sink.makes_rivals_wait:
            rival.join()

    with sink.before_commit(meet):
        sink.store(rows(*range(4)), 0)
    rival.join()

    assert begun
    assert sink.stored() == rows(*range(6))
    assert sink.position(ORDERS) == {ORDERS: 6}


def a_batch_fails_before_its_commit(sink: SinkUnderTest) -> None:
    def crash() -> None:
        raise CrashError

    sink.store(rows(0, 1))
    with sink.before_commit(crash), refused("", CrashError):
        sink.store(rows(2, 3), 1)
    after_crash = sink.stored(), sink.position(ORDERS)
    sink.store(rows(2, 3), 1, "second")

    assert after_crash == (rows(0, 1), {ORDERS: 2})
    assert sink.stored() == rows(0, 1, 2, 3)


def the_answer_to_a_commit_is_lost(sink: SinkUnderTest) -> None:
    with sink.answer_lost():
        sink.store(rows(0, 1, 2))
    sink.store(rows(3), 1)

    assert sink.stored() == rows(0, 1, 2, 3)


def two_queries_fill_one_target(sink: SinkUnderTest) -> None:
    other = sink.another_query()

    sink.store(rows(0, 1, 2))
    other.store(rows(0, 2))
    for again in (sink, other):
        again.store(rows(2, 3), 0, "second")

    assert sink.stored() == sorted([*rows(0, 1, 2, 3), *rows(0, 2, 3)])
    assert sink.position(ORDERS) == other.position(ORDERS) == {ORDERS: 4}


def a_filter_leaves_rows_out(sink: SinkUnderTest) -> None:
    """A batch ends at its planned end: filtered rows are not read again."""
    sink.store(rows(1), 0, plan={ORDERS: (0, 5), OTHERS: (0, 3)})
    sink.store([], 1, plan={ORDERS: (5, 9), OTHERS: (3, 3)})
    for run in ("second", "third"):
        sink.store(rows(10), 2, run, plan={ORDERS: (9, 11), OTHERS: (3, 4)})

    assert sink.stored() == rows(1, 10)
    assert sink.position(ORDERS, OTHERS) == {ORDERS: 11, OTHERS: 4}


def a_target_was_restored(sink: SinkUnderTest) -> None:
    """Rows of the checkpoint that the restored ledger lacks are a hole that nothing would fill."""
    sink.store(rows(0, 2), 0, plan={ORDERS: (0, 3)})
    with refused(r"starts at offset 6 of orders:0.* below 3: offsets 3 to 5 would be missing.* --to orders:0@6`"):
        sink.store(rows(6, 8), 2, "second", plan={ORDERS: (6, 9)})
    sink.store(rows(*range(3, 7)), 0, "third", checkpoint="new", plan={ORDERS: (3, 7)})

    assert sink.stored() == rows(0, 2, *range(3, 7))
    assert sink.position(ORDERS) == {ORDERS: 7}


def a_topic_was_created_again(sink: SinkUnderTest) -> None:
    """The source goes back to 0 in a separate batch, and so does the ledger."""
    sink.store(rows(*range(5)), 0, plan={ORDERS: (0, 5)})
    for run in ("first", "second"):
        sink.store([], 1, run, plan={ORDERS: (5, 0)})
    sink.store(rows(0, 1), 2, "second", plan={ORDERS: (0, 2)})

    assert sink.stored() == sorted(rows(*range(5), 0, 1))
    assert sink.position(ORDERS) == {ORDERS: 2}


def a_query_begins_of_which_nothing_was_stored(sink: SinkUnderTest) -> None:
    """It begins there again, whatever its options are by then."""
    for at in (7, 9):
        sink.begin({ORDERS: LedgerEntry(at, at), OTHERS: LedgerEntry(at, at)})
    before = sink.position(ORDERS, OTHERS, PAYMENTS)
    sink.store(rows(7, 8))
    sink.begin({ORDERS: LedgerEntry(20, 20), PAYMENTS: LedgerEntry(3, 3)})

    assert before == {ORDERS: 7, OTHERS: 7}
    assert sink.stored() == rows(7, 8)
    assert sink.position(ORDERS, OTHERS, PAYMENTS) == {ORDERS: 9, OTHERS: 7, PAYMENTS: 3}


def an_operator_changes_the_ledger(sink: SinkUnderTest) -> None:
    """Stored rows come again, others are left out, and a forgotten partition begins by its options."""

    def entries(query: str = sink.query) -> list[administration.QueryLedger]:
        return administration.of_query(administration.queries({"t": sink.sink}), query)

    def reset(to: str | None) -> None:
        found = entries()
        wanted = None if to is None else administration.positions(to, found[0].entries)
        administration.write(found, administration.changes(found, wanted))

    sink.store(rows(0, 1, 2, 3))
    reset("orders:0@2")
    back = sink.position(ORDERS)
    sink.store(rows(2, 3, 4), 0, "second", checkpoint="new")
    reset("orders:0@7")
    sink.store(rows(5, 6, 7), 1, "second", checkpoint="new")
    (moved,) = administration.rename(entries(), sink.query, f"{sink.query}-2", dry_run=False)
    before, after = moved.entries[ORDERS], entries(f"{sink.query}-2")[0].entries[ORDERS]
    sink.store(rows(0), 0, "third", checkpoint="third")
    reset(None)

    assert back == {ORDERS: 2}
    assert (after.end, after.start) == (8, before.start)
    assert sink.position(ORDERS) == {}
    assert sink.stored() == sorted(rows(*range(5), 2, 3, 7, 0))


#: Every function here that is played on a sink.
SCENARIOS: Sequence[Callable[[SinkUnderTest], None]] = [
    played for played in tuple(globals().values()) if isfunction(played) and "sink" in played.__annotations__
]
