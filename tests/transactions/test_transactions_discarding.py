"""What becomes of halves whose checks are exhausted: each discard policy, one that hangs, options without sense."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from transaction_tools import Bench

from penstock.errors import ConfigurationError
from penstock.transactions import Coordinator, HalfMessage, TransactionState
from penstock.transactions.coordinator.checks.discard_policy import Discarding, Exhausted
from penstock.transactions.stores.file import FileStore
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

_HALF = Half(new_id(), "g", "t", None, None, b"v", (), None)


def exhaust(
    discard: object, timeout_s: float = 30.0, half: Half | None = _HALF
) -> tuple[list[Verdict], Discarding, Exhausted]:
    decided: list[Verdict] = []
    discarding = Discarding(discard, timeout_s, "test")  # type: ignore[arg-type] # also what no policy may return
    return decided, discarding, Exhausted(_HALF.transaction_id, "g", 15, lambda: half, decided.append)


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        ("topic", Verdict.DISCARD),
        ("commit", Verdict.COMMIT),
        ("rollback", Verdict.ROLLBACK),
        (lambda _: TransactionState.COMMIT, Verdict.COMMIT),
        (lambda _: TransactionState.ROLLBACK, Verdict.ROLLBACK),
        (lambda _: TransactionState.UNKNOWN, Verdict.DISCARD),
        (lambda _: "nonsense", Verdict.DISCARD),
        (lambda _: {}["raises"], Verdict.DISCARD),
        (lambda _: sys.exit("raises"), Verdict.DISCARD),
    ],
)
def test_each_discard_policy_decides(policy: object, verdict: Verdict) -> None:
    decided, discarding, exhausted = exhaust(policy)

    discarding.settle(exhausted)

    wait_until(lambda: decided == [verdict], 20)
    discarding.close()


def test_what_was_decided_before_the_policy_has_its_turn_is_not_asked_about() -> None:
    asked: list[HalfMessage] = []

    def policy(half: HalfMessage) -> TransactionState:
        asked.append(half)
        return TransactionState.COMMIT

    decided, discarding, exhausted = exhaust(policy, half=None)
    discarding.settle(exhausted)
    wait_until(lambda: not discarding._asked, 20)

    assert (asked, decided) == ([], [])
    discarding.close()


def test_a_policy_that_hangs_has_said_unknown_and_what_it_says_too_late_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    let_go, asked = threading.Event(), []

    def policy(half: HalfMessage) -> TransactionState:
        asked.append(half.transaction_id)
        let_go.wait(60)
        return TransactionState.COMMIT

    decided, discarding, exhausted = exhaust(policy, timeout_s=0.1)
    discarding.settle(exhausted)
    wait_until(lambda: bool(asked), 20)

    def given_up() -> bool:
        discarding.tend()
        return bool(decided)

    wait_until(given_up, 20)
    # It is still undecided after an interval: what was decided got lost.
    discarding.settle(exhausted)
    assert decided == [Verdict.DISCARD, Verdict.DISCARD]
    assert (len(asked), discarding.hung) == (1, 1)
    let_go.set()
    wait_until(lambda: "returned too late" in caplog.text, 20)
    assert len(decided) == 2
    discarding.close()


def test_a_policy_that_hangs_every_time_leaves_nothing_undecided() -> None:
    let_go = threading.Event()

    def policy(half: HalfMessage) -> TransactionState:
        let_go.wait(60)
        return TransactionState.COMMIT

    decided: dict[int, Verdict] = {}
    discarding = Discarding(policy, 0.05, "test")
    crowd = [
        Exhausted(new_id(), "g", 15, lambda: _HALF, lambda verdict, n=n: decided.update({n: verdict}))  # type: ignore[misc] # bound at once
        for n in range(20)
    ]

    def all_are_decided() -> bool:
        discarding.tend()
        for n, one in enumerate(crowd):
            if n not in decided:
                discarding.settle(one)
        return len(decided) == len(crowd)

    wait_until(all_are_decided, 60)

    assert set(decided.values()) == {Verdict.DISCARD}
    assert discarding.hung < len(crowd), "threads are bounded"
    let_go.set()
    discarding.close()


@pytest.mark.parametrize(
    "options", [{"discard": "keep"}, {"check_backoff": 0.5}, {"check_timeout": 0}, {"check_max": 70_000}]
)
def test_options_of_checks_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Coordinator(bootstrap_servers="127.0.0.1:1", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"discard": "keep"},
        {"check_backoff": 0.5},
        {"check_timeout": 0},
        {"check_max": 70_000},
        {"transaction_timeout": -1},
        {"check_interval": "often"},
        {"session_timeout": 0},
    ],
)
def test_the_same_options_for_the_other_stores_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    store = FileStore(tmp_path, bootstrap_servers="127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Coordinator(store=store, **options)


def test_a_coordinator_has_one_store_and_what_is_the_stores_own_is_refused_beside_it(tmp_path: Path) -> None:
    store = FileStore(tmp_path, bootstrap_servers="127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="bootstrap_servers or a store"):
        Coordinator()
    with pytest.raises(ConfigurationError, match="bootstrap_servers or a store"):
        Coordinator(bootstrap_servers="127.0.0.1:1", store=store)
    with pytest.raises(ConfigurationError, match="store must be a SqlStore or FileStore"):
        Coordinator(store=cast("FileStore", tmp_path))
    of_kafka: list[dict[str, Any]] = [
        {"prefix": "other"},
        {"partitions": 7},
        {"target_latency": 1},
        {"instance": "a"},
        {"config": {"acks": 1}},
    ]
    for options in of_kafka:
        with pytest.raises(ConfigurationError, match="for a store in Kafka"):
            Coordinator(store=store, **options)


def test_discard_policies_settle_exhausted_halves_in_kafka(bench: Bench) -> None:
    seen: list[int] = []

    def policy(half: HalfMessage) -> TransactionState:
        seen.append(half.check_count)
        return TransactionState.COMMIT if half.key == b"keep" else TransactionState.UNKNOWN

    producer = bench.producer(check=lambda _: TransactionState.UNKNOWN)
    coordinator = bench.coordinator(check_max=2, discard=policy, check_backoff=1.5)
    for key in ("keep", "drop"):
        with producer.transaction(bench.topic, key=key, value="v") as tx:
            tx.unknown()

    now = bench.settled(coordinator, committed=1, discarded=1)

    assert seen == [2, 2]
    assert bench.visible() == [(b"keep", b"v")]
    assert [key for key, _ in bench.visible(bench.topics.discarded)] == [b"drop"]
    assert now.answered_checks == 4
