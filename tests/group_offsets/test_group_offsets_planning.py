"""A changed commit has the meaning of a model of sets: which offsets are done before and after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from positions_drawn import GROUP, TOPIC, done_of, positions, runs_of

from penstock.errors import ConfigurationError, PenstockError
from penstock.group_offsets.planning import Change, change, refuse_coordinators, reset, skip
from penstock.group_offsets.positions import Position, clipped, position, total
from penstock.group_offsets.targets import Target, To
from penstock.offsets import MAX_METADATA_CHARS, decode, encode, owner_of

OFFSETS = st.sets(st.integers(0, 60)).map(runs_of)


def reset_to(to: Target, before: Position, *, keep_done: bool = False) -> Change:
    [changed] = reset(GROUP, to, [before], {}, keep_done=keep_done)
    return changed


def as_consumer_reads(changed: Change) -> set[int]:
    """Return the offsets of the log that are done for who reads this commit."""
    log = changed.before.log
    found = decode(changed.offset, changed.metadata, owner_of(GROUP, *changed.before.part))
    return done_of(log, changed.offset, found.done if found else ())


@given(positions(), st.data())
def test_a_message_that_is_skipped_is_done_and_nothing_else_changes(before: Position, data: st.DataObject) -> None:
    log = before.log
    was_done = done_of(log, log.start if before.committed is None else before.committed, before.done)
    offset = data.draw(st.integers(log.start, log.stop))
    try:
        skipped = skip(GROUP, before, offset)
    except PenstockError:
        assert before.committed is None or offset not in log or offset in was_done
        return

    assert as_consumer_reads(skipped) == was_done | {offset}
    assert (skipped.again, skipped.skipped) == (0, 1)


@given(OFFSETS, st.integers(0, 60), st.integers(0, 60))
def test_clipped_ranges_are_those_of_sets(runs: tuple[range, ...], start: int, stop: int) -> None:
    inside = {offset for run in runs for offset in run if start <= offset < stop}

    assert runs_of(inside) == clipped(runs, start, stop)
    assert total(clipped(runs, start, stop)) == len(inside)


@given(positions())
def test_the_lag_less_what_is_done_above_is_what_is_left(before: Position) -> None:
    log = before.log

    if before.committed is None:
        assert before.lag is before.left is None
    else:
        assert before.left == len(set(log) - done_of(log, before.committed, before.done))


@given(positions(), st.data(), st.booleans())
def test_a_reset_tells_exactly_what_is_handled_again_and_what_is_skipped(
    before: Position, data: st.DataObject, keep_done: bool
) -> None:
    log = before.log
    target = data.draw(st.integers(log.start, log.stop))
    was_done = done_of(log, before.committed, before.done)

    changed = reset_to(Target(To.OFFSET, target), before, keep_done=keep_done)

    is_done = as_consumer_reads(changed)
    assert is_done == done_of(log, target, before.done if keep_done else ())
    assert changed.again == len(was_done - is_done)
    assert changed.skipped == len(is_done - was_done)
    assert changed.cut == 0


@given(positions(0), positions(1), st.integers(-5, 70))
def test_all_offsets_outside_of_their_logs_are_refused_with_their_ranges(
    first: Position, second: Position, offset: int
) -> None:
    to = Target(To.OFFSET, offset)
    outside = [before for before in (first, second) if not before.log.start <= offset <= before.log.stop]
    if not outside:
        assert [it.offset for it in reset(GROUP, to, [first, second], {}, keep_done=False)] == [offset, offset]
        return

    with pytest.raises(ConfigurationError) as refused:
        reset(GROUP, to, [first, second], {}, keep_done=False)

    for before in (first, second):
        says = f"{before.place} cannot begin at {offset}: its log begins at {before.log.start} and ends at "
        assert (f"{says}{before.log.stop}" in str(refused.value)) == (before in outside)


def test_targets_are_found_by_partition() -> None:
    before = [Position(TOPIC, 0, 5, range(2, 10)), Position(TOPIC, 1, None, range(3, 4))]
    found = {(TOPIC, 0): 7, (TOPIC, 1): 4}

    def offsets(to: Target) -> list[int]:
        return [one.offset for one in reset(GROUP, to, before, found, keep_done=False)]

    assert offsets(Target(To.EARLIEST)) == [2, 3]
    assert offsets(Target(To.LATEST)) == [7, 4]
    assert offsets(Target(To.TIME, 17)) == [7, 4]
    assert offsets(Target(To.SHIFT, -2)) == [3], "without an offset there is nothing to count from"


def test_a_map_of_a_longer_topic_of_the_same_name_is_kept_no_further_than_the_log() -> None:
    before = Position(TOPIC, 0, 5, range(20), (range(8, 10), range(15, 30)))

    changed = reset_to(Target(To.OFFSET, 3), before, keep_done=True)

    assert changed.done == (range(8, 10), range(15, 20))


def test_what_a_commit_has_no_room_for_is_handled_again_and_said() -> None:
    # Runs of varied length, so that no form of the map is small.
    done, at = [], 1000
    for number in range(20_000):
        at += 1 + (number * 7919) % 113
        done.append(range(at, at + 1 + (number * 104_729) % 97))
        at = done[-1].stop
    before = Position(TOPIC, 0, 1000, range(at), tuple(done))

    changed = change(GROUP, before, 500, before.done)

    assert len(changed.metadata) <= MAX_METADATA_CHARS
    assert changed.cut == total(done) - total(changed.done) > 0
    assert changed.again == 500 + changed.cut


def test_metadata_that_is_no_map_of_this_group_is_foreign() -> None:
    other = encode(5, [range(7, 9)], owner=owner_of("another", TOPIC, 0))
    mine = encode(5, [range(7, 9)], owner=owner_of(GROUP, TOPIC, 0))

    seen = [
        position(GROUP, (TOPIC, 0), (5, text), range(10)) for text in (other, mine, "leader of the flock", "", None)
    ]

    assert [one.is_foreign for one in seen] == [True, False, True, False, False]
    assert [one.done_above for one in seen] == [0, 2, 0, 0, 0]


def test_the_checkpoints_of_a_coordinator_are_not_moved() -> None:
    refuse_coordinators("shop.coordinator", ["orders"])
    refuse_coordinators("sms", ["penstock.half"])

    with pytest.raises(ConfigurationError, match="penstock tx"):
        refuse_coordinators("penstock.coordinator", ["penstock.half", "penstock.op"])
