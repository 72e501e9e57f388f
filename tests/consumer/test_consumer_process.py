"""A consumer process that is killed, stopped, or stopped twice."""

from __future__ import annotations

import signal
from pathlib import Path

from kafka_tools import committed, produce
from penstock.devbroker import DevBroker
from support.consumers import NewTopic, all_committed, child, group_of
from waiting import wait_until

CHILD = Path(__file__).with_name("consumer_child.py")


def lines(path: Path) -> list[tuple[str, int, int]]:
    if not path.exists():
        return []
    parts = (line.split() for line in path.read_text().splitlines())
    return [(key, int(partition), int(offset)) for key, partition, offset in parts]


def test_a_process_killed_in_mid_stream_loses_nothing_and_keeps_the_order(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic, out = new_topic(partitions=3), tmp_path / "out"
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 50), b"x") for i in range(3000)))

    # The first has committed nothing when it is killed, the second has.
    for handled_before, hold_after, commit_interval in ((0, 400, 3600), (400, 800, 0.1)):
        options = ("--seconds=0.003", f"--hold-after={hold_after}", f"--commit-interval={commit_interval}")
        with child(CHILD, broker.bootstrap_servers, topic, out, *options) as process:
            wait_until(lambda wanted=handled_before + hold_after: len(lines(out)) == wanted)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    with child(CHILD, broker.bootstrap_servers, topic, out, "--seconds=0.003") as process:
        wait_until(lambda: all_committed(broker.bootstrap_servers, group_of(topic), topic, 3), interval=0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    handled = lines(out)
    assert len(handled) >= 3400, "the first kill left nothing to be repeated"
    assert len({(partition, offset) for _, partition, offset in handled}) == 3000
    for key in {key for key, _, _ in handled}:
        offsets = [offset for value, _, offset in handled if value == key]
        # I2: it rises, save that it may restart below: `1 2 1 2 3` is legal, `1 3 2` is not.
        wanted = sorted(set(offsets))
        position = {offset: place for place, offset in enumerate(wanted)}
        highest = -1
        for former, offset in zip([None, *offsets], offsets, strict=False):
            assert position[offset] <= highest + 1, f"{key} jumped over a message"
            if former is not None and offset > former:
                assert position[offset] == position[former] + 1, f"{key} left one out after a restart"
            highest = max(highest, position[offset])


def test_the_first_signal_drains_commits_and_leaves(broker: DevBroker, new_topic: NewTopic, tmp_path: Path) -> None:
    topic, out = new_topic(), tmp_path / "out"
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(200)))

    with child(CHILD, broker.bootstrap_servers, topic, out, "--hold-after=11") as process:
        wait_until(lambda: len(lines(out)) == 11)
        process.send_signal(signal.SIGTERM)
        out.with_suffix(".go").touch()
        code = process.wait(60)

    assert code == 0
    assert len(lines(out)) == 200
    assert committed(broker.bootstrap_servers, group_of(topic), topic, 1)[0].offset == 200


def test_the_second_signal_leaves_at_once_and_commits_what_is_done(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic, out = new_topic(), tmp_path / "out"
    produce(broker.bootstrap_servers, topic, ((b"one", b"x") for _ in range(200)))

    # All of them would take 100 s, and a drain may take 30 s.
    with child(CHILD, broker.bootstrap_servers, topic, out, "--seconds=0.5") as process:
        wait_until(lambda: len(lines(out)) >= 2)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    done = lines(out)
    # What it gave up is no order to end in.
    assert code == 1
    assert len(done) < 50
    assert committed(broker.bootstrap_servers, group_of(topic), topic, 1)[0].offset == len(done)
