"""Stores of each kind, while their broker is restarted, killed and frozen, and a target comes and goes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conformance.store_cases import StoreBench, bench_of, settled

from kafka_tools import STEADY, read_all
from penstock import clients
from penstock.devbroker import DevBroker
from penstock.transactions import Coordinator
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

OPTIONS = {"transaction_timeout": 600.0}
#: Seconds after a broker's return until all that was committed since is published; and the longest wait of a caller.
BACK_S = 10.0
BUSY_BACK_S = 120.0


@dataclass
class Load:
    """Sends to a store as fast as a service would: most to the topic that is well, each fifth to the other."""

    bench: StoreBench
    coordinator: Coordinator
    comes_and_goes: str
    back_s: float
    stopping: threading.Event = field(default_factory=threading.Event)
    sent: dict[str, list[bytes]] = field(default_factory=dict)

    def run(self) -> None:
        number = 0
        while not self.stopping.wait(0.03):
            number += 1
            topic = self.comes_and_goes if not number % 5 else self.bench.topic
            value = b"%d" % number
            self.bench.send(Verdict.COMMIT, self.bench.half(value, key=b"%d" % (number % 7), topic=topic))
            self.sent.setdefault(topic, []).append(value)

    def goes_on(self) -> None:
        """Wait until messages that are committed from now on are published."""
        before, already = self.coordinator.statistics().committed, len(self.sent.get(self.bench.topic, ()))
        wait_until(lambda: len(self.sent.get(self.bench.topic, ())) > already + 3, 30)
        wait_until(lambda: self.coordinator.statistics().committed > before + 3, self.back_s)


@contextlib.contextmanager
def loads(broker: DevBroker, folder: Path, back_s: float) -> Iterator[Sequence[Load]]:
    """A store of each kind, with its coordinator, under load."""
    with contextlib.ExitStack() as stack:
        made: list[Load] = []
        for kind in ("kafka", "file", "sqlite"):
            well, other = f"{kind}-well", f"{kind}-other"
            for topic in (well, other):
                broker.create_topic(topic)
            bench = bench_of(kind, broker.bootstrap_servers, well, folder)
            stack.callback(bench.close)
            # So that its target was there once, and its statistics begin at nothing.
            made.append(Load(bench, bench.coordinator(**OPTIONS), other, back_s))
        threads = [threading.Thread(target=load.run) for load in made]
        try:
            for thread in threads:
                thread.start()
            yield made
        finally:
            for load, thread in zip(made, threads, strict=True):
                load.stopping.set()
                thread.join(60)


def restarted(broker: DevBroker, _: float) -> None:
    broker.restart()


def killed(broker: DevBroker, _: float) -> None:
    pid = broker.pid
    broker.kill()
    broker.restart()
    assert broker.pid != pid


def frozen(broker: DevBroker, seconds: float) -> None:
    broker.freeze()
    # So long is the fault.
    time.sleep(seconds)
    broker.thaw()


def endure(
    broker: DevBroker,
    folder: Path,
    faults: Sequence[Callable[[DevBroker, float], None]],
    frozen_s: float,
    back_s: float,
) -> None:
    """Inject all these faults into a broker; committed messages are published once, in the order of their keys."""
    with loads(broker, folder, back_s) as made:
        for load in made:
            load.goes_on()
        for fault in faults:
            fault(broker, frozen_s)
            for load in made:
                load.goes_on()
        for load in made:
            load.stopping.set()
        for load in made:
            settled(load.coordinator, timeout=90)
        for load in made:
            assert load.coordinator.statistics().left_behind <= 2 * len(faults)
            for topic, values in load.sent.items():
                seen = [message.value() or b"" for message in read_all(broker.bootstrap_servers, topic)]
                assert Counter(seen) == Counter(values)
                for key in range(7):
                    ours = [value for value in values if int(value) % 7 == key]
                    assert [value for value in seen if int(value) % 7 == key] == ours


@pytest.mark.parametrize(
    ("faults", "back_s"),
    [
        pytest.param([killed], BUSY_BACK_S, marks=pytest.mark.thorough),
        pytest.param([restarted, killed, frozen], BACK_S, marks=pytest.mark.chaos),
    ],
)
def test_a_broker_that_is_restarted_killed_and_frozen_loses_and_doubles_nothing_of_stores(
    tmp_path: Path, faults: Sequence[Callable[[DevBroker, float], None]], back_s: float
) -> None:
    # Not steady: one that was killed is back sooner. It is frozen for less than its session.
    with DevBroker() as broker:
        endure(broker, tmp_path, faults, 4.0, back_s)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", [restarted, killed, frozen])
def test_a_broker_that_fails_ten_times_loses_and_doubles_nothing_of_stores(
    tmp_path: Path, fault: Callable[[DevBroker, float], None]
) -> None:
    with DevBroker(config=STEADY if fault is frozen else {}) as broker:
        endure(broker, tmp_path, [fault] * 10, 20.0, BACK_S)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_target_that_is_deleted_and_made_again_under_load_doubles_nothing_and_blocks_nothing(tmp_path: Path) -> None:
    with DevBroker(config=STEADY) as broker, loads(broker, tmp_path, BACK_S) as made:
        admin = clients.admin(broker.bootstrap_servers, {})
        for _ in range(4):
            for load in made:
                load.goes_on()
                topic = load.comes_and_goes
                admin.delete_topics([topic])[topic].result()
                wait_until(lambda topic=topic: topic not in admin.list_topics(timeout=30).topics)  # type: ignore[misc] # bound at once
                load.goes_on()
                broker.create_topic(topic)
        for load in made:
            load.stopping.set()
        for load in made:
            settled(load.coordinator, timeout=90)
            well = load.bench.topic
            seen = [message.value() for message in read_all(broker.bootstrap_servers, well)]
            assert Counter(seen) == Counter(load.sent[well])
            others = Counter(message.value() for message in read_all(broker.bootstrap_servers, load.comes_and_goes))
            assert max(others.values()) == 1
            assert set(others) <= set(load.sent[load.comes_and_goes])
