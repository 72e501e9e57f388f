"""The rules of the ledgers, row by row, and together: every row is applied once, or its batch refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SinkError
from penstock.spark_sink.ledger.rules import BATCHES, Batch, LedgerEntry, Rule, Span, rule_of, unknown

PART = ("orders", 0)
#: Batch 3 of a query, planned from 10 to 20.
HELD = LedgerEntry(20, 10, "topic", "query", 3)
#: The same as a former version, or a sink that does not know plans, writes it.
UNPLANNED = LedgerEntry(20, None, "topic", "query", 3)
#: The start of a query without stored rows.
BEGUN = LedgerEntry(20, 20, "topic")


@pytest.mark.parametrize(
    ("held", "batch", "rule"),
    [
        (None, LedgerEntry(30, 20, "topic", "query", 4), Rule.FIRST),
        (HELD, LedgerEntry(30, 20, "topic", "query", 4), Rule.NEXT),
        (HELD, LedgerEntry(20, 20, "topic", "query", 4), Rule.NEXT),
        (HELD, LedgerEntry(30, 20, None, "another", 0), Rule.NEXT),
        (BEGUN, LedgerEntry(30, 20, "topic", "query", 0), Rule.NEXT),
        (HELD, HELD, Rule.REPLAY),
        (HELD, LedgerEntry(20, 10, "topic", "another", 0), Rule.REPLAY),
        (HELD, LedgerEntry(18, 15, None, "another", 7), Rule.REPLAY),
        (HELD, LedgerEntry(10, 5, "topic", "query", 2), Rule.REPLAY),
        (UNPLANNED, LedgerEntry(20, 10, "topic", "query", 3), Rule.REPLAY),
        (HELD, LedgerEntry(30, 15, "topic", "another", 0), Rule.OVERLAP),
        # A checkpoint that came back from a backup numbers another batch 3.
        (HELD, LedgerEntry(25, 10, "topic", "query", 3), Rule.OVERLAP),
        (HELD, LedgerEntry(30, 21, "topic", "query", 4), Rule.GAP),
        (HELD, LedgerEntry(21, 21, None, "another", 0), Rule.GAP),
        (BEGUN, LedgerEntry(30, 21, "topic", "query", 0), Rule.GAP),
        # Behind its last row may be rows that a filter has dropped.
        (UNPLANNED, LedgerEntry(30, 25, "topic", "query", 4), Rule.NEXT),
        (HELD, LedgerEntry(0, 20, None, "query", 4), Rule.RECREATED),
        (LedgerEntry(0, 20, None, "query", 4), LedgerEntry(0, 20, None, "query", 4), Rule.REPLAY),
        (LedgerEntry(0, 20, None, "query", 4), LedgerEntry(0, 20, None, "another", 4), Rule.GAP),
        (LedgerEntry(0, 20, None, "query", 4), LedgerEntry(3, 0, None, "query", 5), Rule.NEXT),
        # Another copy has gone back before, or has yet to.
        (HELD, LedgerEntry(0, 25, None, "another", 1), Rule.GAP),
        (HELD, LedgerEntry(0, 15, None, "another", 1), Rule.ANOTHER_LOG),
        (HELD, LedgerEntry(30, None, "topic", "query", 4), Rule.UNPLANNED),
    ],
)
def test_the_rule_of_a_batch_is(held: LedgerEntry | None, batch: LedgerEntry, rule: Rule) -> None:
    assert rule_of(held, batch) is rule


def batch(start: int, end: int, number: int = 4) -> Batch:
    return Batch("table orders", number, "query", {PART: (start, end)}, reset="penstock sink reset q")


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (
            batch(25, 30),
            (
                "batch 4 starts at offset 25 of orders:0, but table orders holds only what lies below 20: offsets 20 "
                "to 24 would be missing, for example because the target was restored from a backup; to store them as "
                "well, start the query by start_sink with a new checkpoint_location: it begins where the ledger ends, "
                "if Kafka still holds them; to go on without them, run `penstock sink reset q --to orders:0@25`"
            ),
        ),
        (
            replace(batch(25, 30), planned={PART: (25, 30), ("new", 0): (3, 4), ("orders", 1): (9, 9)}),
            "run `penstock sink reset q --to orders:0@25,orders:1@9`",
        ),
        (
            batch(15, 0),
            "batch 4 goes back from offset 15 of orders:0 to 0, as the topic was created again or its log was cut",
        ),
    ],
)
def test_a_batch_that_does_not_fit_the_ledger_is_refused_before_its_rows_are_touched(refused: Batch, text: str) -> None:
    ledger = {PART: HELD, ("orders", 1): LedgerEntry(8, 8)}
    for refuses in (lambda: refused.applied_below(ledger), lambda: refused.entries_after(ledger, {})):
        with pytest.raises(SinkError, match=re.escape(text)):
            refuses()


@pytest.mark.parametrize(
    ("held", "late", "span"),
    [
        (HELD, batch(20, 30), Span(19, 25)),
        (HELD, batch(20, 30), Span(20, 30)),  # from another source
        (None, batch(20, 30), Span(19, 25)),
        (HELD, batch(10, 20, 3), Span(9, 19)),  # in a batch that comes again
        (UNPLANNED, Batch("table orders", 4, "query"), Span(19, 25)),
    ],
)
def test_rows_of_an_earlier_batch_are_refused_and_named(held: LedgerEntry | None, late: Batch, span: Span) -> None:
    ledger = {} if held is None else {PART: held}
    with pytest.raises(SinkError, match=r"for table orders holds a row of orders:0@\d+, but .* holds rows back"):
        late.entries_after(ledger, {PART: span})


@pytest.mark.parametrize(("number", "query"), [(2, "query"), (3, "query"), (4, "another")])
def test_without_a_plan_a_batch_that_is_no_later_one_comes_again(number: int, query: str) -> None:
    repeated = Batch("table orders", number, query)

    assert repeated.applied_below({PART: UNPLANNED}) == {PART: 20}
    assert repeated.entries_after({PART: UNPLANNED}, {PART: Span(12, 19)}) == {}
    assert repeated.entries_after({PART: UNPLANNED}, {PART: Span(12, 22)}) == {
        PART: LedgerEntry(23, None, "topic", query, number)
    }


@pytest.mark.parametrize(("number", "query"), [(5, "query"), (2, "query"), (4, "another"), (0, "another")])
def test_results_by_number_continue_only_in_their_own_checkpoint(number: int, query: str) -> None:
    ledger = {BATCHES: LedgerEntry(4, 3, None, "query", 3)}

    def of(number: int, query: str) -> Batch:
        return Batch("table totals", number, query, {BATCHES: (number, number + 1)})

    assert of(3, "query").entries_after(ledger, {}) == {}, "it comes again"
    assert of(4, "query").entries_after(ledger, {}) == {BATCHES: LedgerEntry(5, 4, None, "query", 4)}
    with pytest.raises(SinkError, match=r"table totals holds, which ends with batch 3 of the checkpoint query; .* --f"):
        of(number, query).applied_below(ledger)


def test_an_entry_keeps_its_topic_until_the_log_is_another_one() -> None:
    for end, topic in ((30, "topic"), (0, None)):
        grown = replace(batch(20, end), planned={PART: (20, end), ("orders", 1): (0, 5)})
        assert {entry.topic_id for entry in grown.entries_after({PART: HELD}, {}).values()} == {topic}
    assert unknown({PART: HELD}, {PART: BEGUN, ("orders", 1): BEGUN}) == {("orders", 1): BEGUN}
    assert unknown({PART: HELD}, {PART: LedgerEntry(0, 0, "new topic")}).keys() == {PART}


def test_only_partitions_whose_entry_may_change_are_moved() -> None:
    plan = {("t", n): ends for n, ends in enumerate([(5, 9), (5, 5), (5, 5), (5, 5)])}
    ledger = {("t", 0): LedgerEntry(5, 0), ("t", 1): LedgerEntry(5, 0), ("t", 2): LedgerEntry(5)}

    assert Batch("table t", 1, "q", plan).moves(ledger) == {("t", 0), ("t", 2), ("t", 3)}


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(0, 3), st.sampled_from("abc"), st.booleans()),
        max_size=30,
    )
)
def test_whatever_comes_again_in_whichever_cut_each_row_is_applied_once(
    steps: list[tuple[int, int, int, str, bool]],
) -> None:
    """Batches begin anywhere, as with lost and restored checkpoints; a filter drops a third of the rows."""
    ledger: dict[tuple[str, int], LedgerEntry] = {}
    applied: list[int] = []
    begin = None
    for start, size, number, query, knows_plan in steps:
        survived = [offset for offset in range(start, start + size) if offset % 3]
        planned = {PART: (start, start + size)} if knows_plan else {}
        spans = {PART: Span(survived[0], survived[-1])} if survived else {}
        before = ledger.get(PART)
        step = Batch("table t", number, query, planned)
        # Without a plan no hole is seen. Checkpoints and ledgers lead to none there.
        is_seen = knows_plan and before is not None and before.start is not None
        if before is not None and not is_seen and any(offset % 3 for offset in range(before.end, start)):
            continue
        try:
            below = step.applied_below(ledger).get(PART, 0)
            changed = step.entries_after(ledger, spans)
        except SinkError:
            assert before is not None
            assert start > before.end or (not knows_plan and number > (before.batch_id or 0))
            continue
        applied += [offset for offset in survived if offset >= below]
        ledger |= changed
        if begin is None and PART in ledger:
            begin = start
    if PART in ledger and begin is not None:
        assert sorted(applied) == [offset for offset in range(begin, ledger[PART].end) if offset % 3]
