"""How many decisions share a Kafka transaction."""

from __future__ import annotations

import random
import statistics

import pytest
from transaction_tools import Bench

from penstock.transactions.coordinator import coordinator
from penstock.transactions.coordinator.state.pending.batch_limit import BatchLimit
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.pending.ready_queue import ReadyQueue
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict


def run(limit: BatchLimit, cost_s: float, groups: int, size_bytes: int = 128) -> int:
    """Fill so many groups to the limit, where each decision costs so much, and return the limit then."""
    for _ in range(groups):
        decisions = limit.decisions
        limit.measured(decisions, decisions * size_bytes, 0.004 + decisions * cost_s)
    return limit.decisions


def test_groups_grow_and_shrink_with_their_time() -> None:
    limit = BatchLimit(0.02)
    begun = limit.decisions

    quick = run(limit, 2e-6, 20)
    slow = run(limit, 20e-6, 40)
    quick_again = run(limit, 2e-6, 40)

    assert quick > 2 * begun
    assert slow <= 1.2 * 0.016 / 20e-6
    assert quick_again > 2 * slow


def test_the_target_latency_of_a_coordinator_sizes_its_groups(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BatchLimit] = []

    class Noted(BatchLimit):
        def __init__(self, target_s: float) -> None:
            super().__init__(target_s)
            made.append(self)

    monkeypatch.setattr(coordinator, "BatchLimit", Noted)
    for target_latency in (0.01, 0.2):
        bench.coordinator(target_latency=target_latency).stop()

    short, long = (run(limit, 20e-6, 60) for limit in made)

    # What ends within the target: 0.006 s, and 0.196 s, of 20 microseconds each; and no group is kept below 500.
    assert short == 500
    assert 0.6 * 9_800 < long < 1.2 * 9_800


def test_a_broker_that_is_slow_whatever_a_group_holds_gets_large_groups() -> None:
    limit = BatchLimit(0.02)

    for _ in range(50):
        limit.measured(limit.decisions, limit.decisions * 128, 0.2)

    assert limit.decisions > 5_000


@pytest.mark.parametrize(
    ("fixed_s", "each_s", "ideal"), [(0.004, 20e-6, 800), (0.005, 8e-6, 1_875), (0.05, 20e-6, 2_500)]
)
def test_groups_find_the_size_that_the_costs_speak_for_whatever_the_noise(
    fixed_s: float, each_s: float, ideal: int
) -> None:
    limit = BatchLimit(0.02)
    dice = random.Random(7)  # noqa: S311 - the same noise each time
    found = []

    for _ in range(300):
        decisions = limit.decisions
        limit.measured(decisions, decisions * 128, (fixed_s + decisions * each_s) * dice.lognormvariate(0, 0.2))
        found.append(limit.decisions)

    assert 0.6 * ideal < statistics.median(found[100:]) < 1.6 * ideal


def test_groups_that_are_not_full_say_nothing_about_the_limit() -> None:
    limit = BatchLimit(0.02)
    begun = limit.decisions

    for took_s in (0.001, 1.0):
        limit.measured(3, 3 * 128, took_s)

    assert limit.decisions == begun


def test_large_messages_make_groups_small() -> None:
    limit = BatchLimit(0.02)

    few = run(limit, 2e-6, 20, size_bytes=1 << 20)

    assert few == 4


def pending(size_bytes: int, parts: int = 1) -> Pending:
    """Return a transaction of so many messages of that size each."""
    name = new_id()
    halves = [
        Half(name, "orders", "t", None, None, bytes(size_bytes), (), None, part=(n + 1, parts) if parts > 1 else None)
        for n in range(parts)
    ]
    made = Pending(halves[0], 0)
    for offset, half in enumerate(halves[1:], start=1):
        made.add_part(offset, half)
    return made


def fill(limit: BatchLimit, waiting: list[Pending], parts: int = 1) -> list[Pending]:
    """Choose a group, or a part of one, as a partition does."""
    decisions = ReadyQueue()
    for one in waiting[: 2 * limit.decisions]:
        one.verdict = Verdict.COMMIT
        decisions.add(one)
    return list(decisions.choose(max(1, limit.decisions // parts), lambda _: None, limit.bytes // parts).values())


def test_the_first_group_is_bound_by_the_bytes_of_its_own_messages() -> None:
    waiting = [pending(20_000, parts=100) for _ in range(60)]

    chosen = fill(BatchLimit(0.02), waiting)

    assert len(chosen) == 2  # of two megabytes each, where a group holds four


def test_a_transaction_larger_than_a_group_goes_alone_and_nothing_passes_it() -> None:
    huge, small = pending(9 << 20), pending(10)

    assert fill(BatchLimit(0.02), [huge, small]) == [huge]
    assert fill(BatchLimit(0.02), [small, huge, small]) == [small]


def test_the_parts_of_a_group_are_no_more_than_the_whole() -> None:
    limit = BatchLimit(0.02)
    waiting = [pending(100_000) for _ in range(100)]

    taken = [fill(limit, waiting, parts=4) for _ in range(4)]

    assert sum(one.payload_bytes for part in taken for one in part) <= 4 << 20


def test_keys_and_headers_count_as_the_value_does() -> None:
    half = Half(new_id(), "orders", "t", None, b"key", b"value", (("name", b"content"), ("empty", None)), None)

    content = len("keyvaluenamecontentempty")
    assert content <= Pending(half, 0).payload_bytes <= content + 20


@pytest.mark.parametrize("buffer_messages", [3_000_000, 1_000, 60])
@pytest.mark.parametrize("buffer_bytes", [1 << 30, 1 << 20, 30_000])
def test_groups_shrink_until_the_clients_buffer_takes_them_and_are_seldom_refused_again(
    buffer_messages: int, buffer_bytes: int
) -> None:
    limit, refusals, groups = BatchLimit(0.02), 0, 0
    waiting = [pending(20, parts=50) for _ in range(1_000)]

    while waiting:
        chosen = fill(limit, waiting)
        size = sum(one.payload_bytes for one in chosen)
        if 50 * len(chosen) > buffer_messages or size > buffer_bytes:
            assert limit.refused(len(chosen), size), "each fits by itself"
            refusals += 1
        else:
            limit.measured(len(chosen), size, 0.01)
            groups += 1
            del waiting[: len(chosen)]

    # Some at first, and then one now and then, when larger ones are tried again.
    assert refusals <= 10 + groups / 16


def test_groups_grow_again_when_what_did_not_fit_is_gone() -> None:
    limit = BatchLimit(0.02)
    begun = limit.decisions, limit.bytes
    while limit.decisions > 1:
        assert limit.refused(limit.decisions, limit.bytes)

    run(limit, 2e-6, 2_000)

    assert limit.decisions >= begun[0]
    assert limit.bytes == begun[1]


def test_a_single_transaction_that_does_not_fit_teaches_nothing_about_others() -> None:
    limit = BatchLimit(0.02)
    begun = limit.decisions, limit.bytes

    assert not limit.refused(1, 2 << 30)
    assert (limit.decisions, limit.bytes) == begun
