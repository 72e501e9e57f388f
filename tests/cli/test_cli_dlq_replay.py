"""`penstock dlq replay` on a real broker: what goes back, what stays, and what a second one repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Message, TopicPartition
from confluent_kafka.admin import AdminClient
from dead_letter_tools import origin_headers, put

from kafka_tools import committed, read_all
from penstock.dead_letters.reader import BATCH, REPLAY_GROUP, DeadLetterLog
from penstock.devbroker import DevBroker
from penstock.offsets import CommitPoint

Topics = Callable[..., tuple[str, str]]
Replay = Callable[..., tuple[object, str, str]]


@pytest.fixture
def replay(penstock_command: Replay, broker: DevBroker) -> Replay:
    """Return a function that runs `penstock dlq replay ARGUMENTS...` on the run's broker."""

    def call(*arguments: str) -> tuple[object, str, str]:
        return penstock_command("dlq", "replay", "--bootstrap-servers", broker.bootstrap_servers, *arguments)

    return call


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value() for message in messages]


@pytest.mark.thorough
def test_a_message_goes_back_as_it_was_with_the_place_of_its_dead_letter(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic(4)
    own: list[tuple[str, bytes | None]] = [
        ("traceparent", b"00-1"),
        ("traceparent", b"00-2"),
        ("raw", b"\xff"),
        ("n", None),
    ]
    contents = [(b"k", b"v"), (None, b"no key"), (b"k", None), (b"", b""), (None, None), (b"\xff", b"\xc3\x28")]
    for key, value in contents:
        put(servers, letters, key=key, value=value, headers=origin_headers(original, partition=3, own=own), partition=1)

    code, out, _ = replay(letters)

    assert code == 0
    assert f"6 sent from {letters} to {original}" in out
    back = read_all(servers, original)
    assert [(one.key(), one.value()) for one in back] == contents
    # Not where this client's partitioner would put them: where they came from.
    assert {one.partition() for one in back} == {3}
    for number, one in enumerate(back):
        assert one.headers() == [*own, ("penstock-replayed-from", f"{letters}/1/{number}".encode())]


def test_a_second_replay_repeats_nothing_unless_told_to(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic(2)
    for partition in (0, 1):
        put(servers, letters, value=b"%d", headers=origin_headers(original), partition=partition, count=3)
    replay(letters)

    _, second, _ = replay(letters)
    after_second = len(read_all(servers, original))
    put(servers, letters, value=b"late", headers=origin_headers(original))
    replay(letters)
    after_third = read_all(servers, original)
    _, again, _ = replay(letters, "--again")

    assert f"nothing sent from {letters}" in second
    assert after_second == 6
    assert values(after_third)[6:] == [b"late"]
    assert f"7 sent from {letters} to {original}" in again
    assert len(read_all(servers, original)) == 14
    assert "nothing sent" in replay(letters)[1]


@pytest.mark.parametrize("name", ["exception=OSError", "topic={other}"])
def test_what_was_not_chosen_stays_open_and_what_was_sent_is_not_repeated(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics, new_topic: Callable[..., str], name: str
) -> None:
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic()
    other = new_topic()
    for number in range(6):
        odd = number % 2 == 1
        headers = origin_headers(other if odd else original, exception=f"builtins.{'OSError' if odd else 'KeyError'}")
        put(servers, letters, value=b"letter %d" % number, headers=headers)

    _, first, _ = replay(letters, "--where", name.format(other=other))
    code, rest, _ = replay(letters)

    assert f"3 sent from {letters} to {other}" in first
    assert "3 passed by: not chosen" in first
    assert code == 0
    assert f"3 sent from {letters} to {original}" in rest
    assert values(read_all(servers, other)) == [b"letter 1", b"letter 3", b"letter 5"]
    assert values(read_all(servers, original)) == [b"letter 0", b"letter 2", b"letter 4"]
    assert "nothing sent" in replay(letters)[1]


def test_a_replay_begins_where_it_is_asked_to_and_sends_as_many_and_a_dry_run_nothing(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic(2)
    for partition in (0, 1):
        put(servers, letters, value=b"%d", headers=origin_headers(original), partition=partition, count=5)

    code, dry, _ = replay(letters, "--dry-run", "--limit", "2")
    none, before = read_all(servers, original), committed(servers, REPLAY_GROUP, letters, 1)[0].offset
    replay(letters, "--from", "1@2", "--limit", "2")
    some = values(read_all(servers, original))
    replay(letters)

    assert (code, f"2 would be sent from {letters} to {original}" in dry) == (0, True)
    assert none == []
    assert before < 0
    assert some == [b"2", b"3"]
    assert Counter(values(read_all(servers, original))) == dict.fromkeys([b"0", b"1", b"2", b"3", b"4"], 2)


def test_a_replay_to_another_topic_takes_letters_without_an_origin_too(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics, new_topic: Callable[..., str]
) -> None:
    original, letters = dead_letter_topic()
    other = new_topic()
    put(broker.bootstrap_servers, letters, value=b"known", headers=origin_headers(original))
    put(broker.bootstrap_servers, letters, value=b"unknown")

    refused = [replay(letters, *to) for to in (("--to", letters), ("--to", "no-such-topic"), ("--from", "9@0"))]
    code, _, _ = replay(letters, "--to", other)

    assert [one[0] for one in refused] == [2, 2, 2]
    assert code == 0
    assert values(read_all(broker.bootstrap_servers, other)) == [b"known", b"unknown"]
    assert read_all(broker.bootstrap_servers, original) == []


def test_letters_with_forged_headers_stay_and_hold_up_nobody(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic()
    put(servers, letters, value=b"good 1", headers=origin_headers(original, partition=2_000_000))
    put(servers, letters, value=b"no header")
    put(servers, letters, value=b"bad name", headers=[("__dlq.errors.topic", b"../x"), ("kafka_dlt-x", b"\xff" * 99)])
    put(servers, letters, value=b"nowhere", headers=origin_headers("no-such-topic"))
    put(servers, letters, value=b"itself", headers=origin_headers(letters))
    put(servers, letters, key=None, value=None, headers=[("__dlq.errors.topic", original.encode())])
    put(servers, letters, value=b"good 2", headers=[("__dlq.errors.topic", b"forged"), *origin_headers(original)])

    code, out, err = replay(letters)
    again = replay(letters)

    assert code == 1
    assert f"2 sent from {letters} to {original}" in out
    assert f"5 of {letters} could not go anywhere" in err
    reasons = ("2 tells no original topic", "1 has an original topic that does not exist", "1 says that it comes")
    for reason in (*reasons, "1 has neither key nor value"):
        assert reason in err
    assert again[0] == 1
    assert "nothing sent" in again[1]
    assert values(read_all(servers, original)) == [b"good 1", b"good 2"]


def test_a_message_the_broker_refuses_stops_the_replay_and_the_next_goes_on_from_there(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics, new_topic: Callable[..., str]
) -> None:
    servers = broker.bootstrap_servers
    small = new_topic(1, {"max.message.bytes": "1000"})
    _, letters = dead_letter_topic()
    put(servers, letters, value=b"%d", headers=origin_headers(small), count=BATCH)
    put(servers, letters, value=b"x" * 5000, headers=origin_headers(small))
    put(servers, letters, value=b"last", headers=origin_headers(small))

    code, out, err = replay(letters)
    sent = len(read_all(servers, small))

    assert code == 1
    assert f"{letters}:0@{BATCH} could not be sent to {small}" in err
    assert "run the same command again" in err
    assert f"{sent} sent" in out
    assert BATCH <= sent <= BATCH + 1
    assert replay(letters)[0] == 1
    assert len(read_all(servers, small)) <= BATCH + 1
    assert replay(letters, "--from", f"{letters}:0@{BATCH + 1}")[0] == 0
    assert values(read_all(servers, small)) == [*(b"%d" % number for number in range(BATCH)), b"last"]


def test_a_replay_that_dies_loses_nothing_and_repeats_a_batch_at_most(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All was acknowledged by the broker, and the last batch was not written down yet."""
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic()
    count, left, remember = 4 * BATCH, [None] * 2, DeadLetterLog.remember
    put(servers, letters, value=b"%d", headers=origin_headers(original), count=count)

    def remember_two(*given: Any) -> None:
        left.pop()  # IndexError at the third
        remember(*given)

    with monkeypatch.context() as dying:
        dying.setattr(DeadLetterLog, "remember", remember_two)
        died, _, _ = replay(letters)
    before = len(read_all(servers, original))
    code, _, _ = replay(letters)

    assert (died, code) == (1, 0)
    assert before < count
    handled = Counter(values(read_all(servers, original)))
    assert len(handled) == count
    assert count < sum(handled.values()) <= count + BATCH


def test_letters_that_the_topic_no_longer_keeps_are_passed_by_and_so_are_offsets_of_an_earlier_topic(
    replay: Replay, broker: DevBroker, dead_letter_topic: Topics, admin: AdminClient
) -> None:
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic()
    put(servers, letters, value=b"%d", headers=origin_headers(original), count=5)
    replay(letters, "--limit", "1")
    for future in admin.delete_records([TopicPartition(letters, 0, 3)]).values():
        future.result(20)

    replay(letters)
    with DeadLetterLog(servers) as log:
        log.remember(letters, 0, CommitPoint(1000, ""))
    _, out, _ = replay(letters)

    assert f"2 sent from {letters} to {original}" in out
    assert values(read_all(servers, original)) == [b"0", b"3", b"4", b"3", b"4"]
    assert committed(servers, REPLAY_GROUP, letters, 1)[0].offset == 5
