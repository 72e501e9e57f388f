"""The judge of histories finds each kind of fault, and lets legal histories pass."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import pytest

from histories import Call, Commit, Report, Span, examine


def one_after_the_other(*offsets: int, instance: str = "a", key: str = "k", begin: float = 0.0) -> list[Call]:
    """Calls of one key that take a second each."""
    return [Call(instance, key, 0, offset, begin + place, begin + place + 1.0) for place, offset in enumerate(offsets)]


def judged(
    calls: list[Call], *commits: Commit, keys: str = "kkkkkk", doubtful: Mapping[str, Span] | None = None
) -> Report:
    """Judge calls of one partition whose messages have these keys, from offset 1."""
    produced = {(0, offset): key for offset, key in enumerate(keys, 1)}
    return examine(produced, calls, commits, doubtful=doubtful)


def out_of_order(report: Report) -> bool:
    """Return whether this is the only fault."""
    others = (report.unknown, report.overlaps, report.early_commits, report.regressions)
    assert not any(others), report.faults
    return bool(report.out_of_order)


def test_a_history_without_a_fault_has_none() -> None:
    report = judged(one_after_the_other(1, 2, 3, 4, 5, 6), Commit(0, 4, 3.0), Commit(0, 7, 6.0))

    assert report == Report()
    assert report.faults == []


def test_a_message_without_a_call_that_ended_is_lost_and_one_that_was_never_produced_is_named() -> None:
    report = judged([*one_after_the_other(1, 2, 3, 4), Call("a", "k", 0, 5, 4.0, None)])
    strange = judged(one_after_the_other(1, 2), keys="k")

    assert report.lost == ((0, 5), (0, 6))
    assert report.faults == ["2 lost: (0, 5); (0, 6)"]
    assert (len(strange.unknown), strange.lost) == (1, ())


@pytest.mark.parametrize("offsets", [(1, 2, 1, 2, 3), (1, 2, 2, 3), (1, 1, 1, 2, 3), (1, 2, 3, 2, 3), (1, 2, 3)])
def test_a_redelivery_may_restart_from_a_former_place(offsets: tuple[int, ...]) -> None:
    assert not out_of_order(judged(one_after_the_other(*offsets), keys="kkk"))


@pytest.mark.parametrize(
    "offsets",
    [
        (1, 3, 2),
        (2, 1, 3),
        (1, 2, 3, 4, 5, 4, 3, 4, 5),  # the committed place cannot fall, so neither can a restart
        (1, 2, 3, 4, 5, 3, 5, 4, 5),  # a redelivery must leave nothing out
        (1, 2, 3, 1, 3, 4, 5),
    ],
)
def test_what_neither_follows_nor_restarts_is_out_of_order(offsets: tuple[int, ...]) -> None:
    assert out_of_order(judged(one_after_the_other(*offsets), keys="k" * max(offsets)))


def test_keys_do_not_wait_for_each_other() -> None:
    calls = [
        Call("a", "x", 0, 1, 0.0, 9.0),
        *one_after_the_other(2, 4, key="y"),
        *one_after_the_other(3, key="z", begin=0.5),
    ]

    assert judged(calls, keys="xyzy") == Report()


def test_the_same_key_in_two_partitions_has_two_orders() -> None:
    calls = [Call("a", "k", 1, 7, 0.0, 1.0), Call("a", "k", 0, 3, 2.0, 3.0)]

    assert examine({(0, 3): "k", (1, 7): "k"}, calls) == Report()


def test_two_calls_of_a_key_at_once_in_one_process_overlap() -> None:
    calls = [Call("a", "k", 0, 1, 0.0, 5.0), Call("a", "k", 0, 1, 1.0, 2.0), Call("a", "k", 0, 2, 5.0, 6.0)]

    report = judged(calls, keys="kk", doubtful={"a": (0.0, inf)})

    assert len(report.overlaps) == 1


def test_a_call_that_was_cut_off_overlaps_with_later_ones_of_its_process_only() -> None:
    cut_off = Call("a", "k", 0, 1, 0.0, None)

    assert len(judged([cut_off, *one_after_the_other(1, begin=1.0)], keys="k").overlaps) == 1
    assert judged([cut_off, *one_after_the_other(1, begin=1.0, instance="b")], keys="k").faults == []


def test_two_processes_at_one_key_overlap_while_ownership_is_clear() -> None:
    calls = [Call("a", "k", 0, 1, 0.0, 5.0), Call("b", "k", 0, 1, 1.0, 2.0)]

    assert len(judged(calls, keys="k").overlaps) == 1
    assert judged(calls, keys="k", doubtful={"a": (0.5, inf)}).faults == []


def test_processes_that_follow_each_other_make_one_sequence() -> None:
    former = one_after_the_other(1, 2, 3)

    assert not out_of_order(judged(former + one_after_the_other(2, 3, 4, instance="b", begin=5), keys="kkkk"))
    assert out_of_order(judged(former + one_after_the_other(5, 4, instance="b", begin=5), keys="kkkkk"))


def test_a_process_in_doubt_may_leave_out_what_others_did_meanwhile() -> None:
    calls = [
        *one_after_the_other(1, 2),
        *one_after_the_other(2, 3, 4, instance="b", begin=5),
        *one_after_the_other(5, begin=9),
    ]

    assert not out_of_order(judged(calls, keys="kkkkk", doubtful={"a": (1.5, inf)}))


def test_a_process_in_doubt_may_not_leave_out_what_only_itself_had_done() -> None:
    calls = one_after_the_other(1, 2, 3, 1, 3)

    assert out_of_order(judged(calls, keys="kkk", doubtful={"a": (0.0, inf)}))


def test_where_commits_are_known_a_restart_may_fall_as_long_as_it_stays_above_them() -> None:
    calls = one_after_the_other(1, 2, 3, 4, 3, 2, 3, 4)

    assert not out_of_order(judged(calls, Commit(0, 2, 1.5), keys="kkkk"))
    assert out_of_order(judged(calls, Commit(0, 3, 2.5), keys="kkkk"))


def test_a_commit_of_what_was_not_done_is_early() -> None:
    calls = one_after_the_other(1, 2, 3)

    assert judged(calls, Commit(0, 3, 2.0), keys="kkk").early_commits == ()
    assert len(judged(calls, Commit(0, 3, 1.5), keys="kkk").early_commits) == 1
    assert len(judged(calls[:2], Commit(0, 4, 9.0), keys="kkk").early_commits) == 1


def test_a_commit_that_tells_of_more_above_its_offset_is_judged_by_that_too() -> None:
    calls = [Call("a", "x", 0, 1, 0.0, 9.0), *one_after_the_other(2, 3, key="y")]

    assert judged(calls, Commit(0, 1, 1.5, (range(2, 3),)), keys="xyy").early_commits == ()
    assert len(judged(calls, Commit(0, 1, 1.5, (range(2, 4),)), keys="xyy").early_commits) == 1


def test_a_commit_below_a_former_one_is_a_regression() -> None:
    calls = one_after_the_other(1, 2, 3)

    report = judged(calls, Commit(0, 3, 3.0), Commit(0, 2, 4.0), Commit(0, 4, 5.0), keys="kkk")

    assert len(report.regressions) == 1
    assert judged(calls, Commit(0, 3, 3.0), Commit(0, 3, 4.0), keys="kkk").faults == []


def test_only_a_commit_that_was_there_before_may_be_one_that_was_sent_again() -> None:
    produced, calls = {(0, number): "k" for number in range(1, 4)}, one_after_the_other(1, 2, 3)
    late = [Commit(0, 2, 2.5), Commit(0, 4, 4.0), Commit(0, 2, 5.0)]

    assert examine(produced, calls, late, may_resend=True).regressions == ()
    assert len(examine(produced, calls, late).regressions) == 1
    assert len(examine(produced, calls, late[1:], may_resend=True).regressions) == 1


def test_every_kind_of_fault_is_reported() -> None:
    calls = [
        *one_after_the_other(1, 3),
        Call("a", "k", 0, 3, 1.5, 1.7),
        Call("a", "k", 0, 9, 8.0, 9.0),
    ]

    faults = judged(calls, Commit(0, 4, 2.0), Commit(0, 2, 3.0), keys="kkk").faults

    kinds = ["lost", "never produced", "out of order", "overlapping", "committed early", "committed backwards"]
    assert [kind for kind in kinds if any(f" {kind}: " in fault for fault in faults)] == kinds
