"""`penstock dlq replay` on a real broker: replayed messages, those that stay, and the effect of a second replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Message, TopicPartition
from confluent_kafka.admin import AdminClient
from dead_letter_tools import origin_headers, put
from offsets_tools import stand

from commands import Command
from kafka_tools import committed, read_all
from penstock.dead_letters.reader import BATCH, REPLAY_GROUP, DeadLetterLog
from penstock.devbroker import DevBroker

Topics = Callable[..., tuple[str, str]]


@pytest.fixture
def replay(on_broker: Command) -> Command:
    """Return a function that runs `penstock dlq replay ARGUMENTS...` on the run's broker."""
    return partial(on_broker, "dlq", "replay")


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value() for message in messages]


#: Keys and values, and the headers of each.
CONTENTS = [(b"k", b"v"), (None, b"no key"), (b"k", None), (b"", b""), (None, None), (b"\xff", b"\xc3\x28")]
OWN: list[tuple[str, bytes | None]] = [
    ("traceparent", b"00-1"),
    ("traceparent", b"00-2"),
    ("raw", b"\xff"),
    ("n", None),
]


def test_messages_go_back_as_they_were_each_of_them_once_and_no_others_than_those_that_are_chosen(
    replay: Command, broker: DevBroker, dead_letter_topic: Topics, new_topic: Callable[..., str]
) -> None:
    servers, other = broker.bootstrap_servers, new_topic()
    original, letters = dead_letter_topic(4)
    of_other = {1: "OSError", 3: "OSError", 5: "KeyError"}
    for number in range(6):
        topic, exception = other if number in of_other else original, of_other.get(number, "KeyError")
        put(servers, letters, value=b"%d" % number, headers=origin_headers(topic, exception=f"builtins.{exception}"))
    for key, value in CONTENTS:
        put(servers, letters, key=key, value=value, headers=origin_headers(original, partition=3, own=OWN), partition=1)

    two = ("--from", "1@2", "--limit", "2")
    dry = replay(letters, *two, "--dry-run")
    untouched = read_all(servers, original), committed(servers, REPLAY_GROUP, letters, 2)[1].offset
    replay(letters, *two)
    by_exception = replay(letters, "--where", "exception=OSError")
    by_topic = replay(letters, "--where", f"topic={other}")
    rest, second = replay(letters), replay(letters)
    put(servers, letters, value=b"late", headers=origin_headers(original))
    replay(letters)
    back = read_all(servers, original)
    again, after = replay(letters, "--again"), replay(letters)

    assert (dry.code, f"2 would be sent from {letters} to {original}" in dry.out) == (0, True)
    assert (untouched[0], untouched[1] < 0) == ([], True)
    assert f"2 sent from {letters} to {other}" in by_exception.out
    assert "8 left out: not selected" in by_exception.out
    assert "2 left out: sent by an earlier replay" in by_exception.out
    assert f"1 sent from {letters} to {other}" in by_topic.out
    assert (rest.code, f"7 sent from {letters} to {original}" in rest.out) == (0, True)
    assert f"nothing sent from {letters}" in second.out
    assert [message.value() for message in back if message.partition() == 0] == [b"0", b"2", b"4", b"late"]
    # Not where this client's partitioner would put them: where they came from.
    back = [message for message in back if message.partition() != 0]
    assert {message.partition() for message in back} == {3}
    for number, message in zip((2, 3, 0, 1, 4, 5), back, strict=True):
        assert (message.key(), message.value()) == CONTENTS[number]
        assert message.headers() == [*OWN, ("penstock-replayed-from", f"{letters}/1/{number}".encode())]
    assert f"10 sent from {letters} to {original}" in again.out
    assert (len(read_all(servers, original)), "nothing sent" in after.out) == (20, True)
    assert values(read_all(servers, other)) == [b"1", b"3", b"5"] * 2


def test_dead_letters_with_forged_headers_stay_block_no_other_and_go_to_a_named_topic(
    replay: Command, broker: DevBroker, dead_letter_topic: Topics, new_topic: Callable[..., str]
) -> None:
    servers, other = broker.bootstrap_servers, new_topic()
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
    refused = [replay(letters, *to) for to in (("--to", letters), ("--to", "no-such-topic"), ("--from", "9@0"))]
    to_other = replay(letters, "--to", other)

    assert code == 1
    assert f"2 sent from {letters} to {original}" in out
    assert f"5 of {letters} could not be sent" in err
    reasons = ("2 has no valid original topic", "1 has an original topic that does", "1 names the dead-letter")
    for reason in (*reasons, "1 has neither key nor value"):
        assert reason in err
    assert (again.code, "nothing sent" in again.out) == (1, True)
    assert [outcome.code for outcome in refused] == [2, 2, 2]
    assert (to_other.code, f"1 of {letters} could not be sent" in to_other.err) == (1, True)
    assert values(read_all(servers, other)) == [b"no header", b"bad name", b"nowhere", b"itself"]
    assert values(read_all(servers, original)) == [b"good 1", b"good 2"]


def test_a_message_the_broker_refuses_stops_the_replay_and_the_next_goes_on_from_there(
    replay: Command, broker: DevBroker, dead_letter_topic: Topics, new_topic: Callable[..., str]
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
    replay: Command, broker: DevBroker, dead_letter_topic: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All was acknowledged by the broker, and the last batch was not written down yet."""
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic()
    count, left, remember = 4 * BATCH, [None] * 2, DeadLetterLog.store_progress
    put(servers, letters, value=b"%d", headers=origin_headers(original), count=count)

    def remember_two(*given: Any) -> None:
        left.pop()  # IndexError at the third
        remember(*given)

    with monkeypatch.context() as dying:
        dying.setattr(DeadLetterLog, "store_progress", remember_two)
        died, _, _ = replay(letters)
    before = len(read_all(servers, original))
    code, _, _ = replay(letters)

    assert (died, code) == (1, 0)
    assert before < count
    handled = Counter(values(read_all(servers, original)))
    assert len(handled) == count
    assert count < sum(handled.values()) <= count + BATCH


def test_letters_that_the_topic_no_longer_keeps_are_passed_by_and_so_are_offsets_of_an_earlier_topic(
    replay: Command, broker: DevBroker, dead_letter_topic: Topics, admin: AdminClient
) -> None:
    servers = broker.bootstrap_servers
    original, letters = dead_letter_topic()
    put(servers, letters, value=b"%d", headers=origin_headers(original), count=5)
    replay(letters, "--limit", "1")
    for future in admin.delete_records([TopicPartition(letters, 0, 3)]).values():
        future.result(60)

    replay(letters)
    stand(servers, REPLAY_GROUP, letters, 0, 1000)
    _, out, _ = replay(letters)

    assert f"2 sent from {letters} to {original}" in out
    assert values(read_all(servers, original)) == [b"0", b"3", b"4", b"3", b"4"]
    assert committed(servers, REPLAY_GROUP, letters, 1)[0].offset == 5
