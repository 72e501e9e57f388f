"""`penstock dlq ls` and `show`: the content of dead-letter topics, and the shown part of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dead_letter_tools import origin_headers, put

from commands import Command
from kafka_tools import read_all, transactional, wait_for_markers
from penstock.dead_letters.headers import DeadLetterFormat
from penstock.devbroker import DevBroker
from penstock.message import HEADERS_LOST
from raw_produce import produce_raw

Topics = Callable[..., tuple[str, str]]


@pytest.mark.parametrize(
    ("command", "says"), [("ls", "{}: 0 dead letters"), ("show", "{} is empty"), ("replay", "nothing sent from {}")]
)
def test_an_empty_dead_letter_topic_is_nothing_special_and_one_that_does_not_exist_is_an_error(
    on_broker: Command, dead_letter_topic: Topics, command: str, says: str
) -> None:
    _, letters = dead_letter_topic(2)

    empty = on_broker("dlq", command, letters)
    absent = on_broker("dlq", command, "dlq.nowhere")

    assert (empty.code, says.format(letters) in empty.out) == (0, True)
    assert (absent.code, "no topic dlq.nowhere" in absent.err) == (1, True)


def test_ls_counts_by_origin_and_exception_in_both_formats_and_finds_topics_by_both_names(
    on_broker: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    original, letters = dead_letter_topic(2)
    servers, named_by_spring = broker.bootstrap_servers, f"{original}-dlt"
    broker.create_topic(named_by_spring)
    put(servers, letters, headers=origin_headers(original, partition=1), partition=0, count=3)
    put(servers, letters, headers=origin_headers(original, partition=1), partition=1, count=2)
    spring = origin_headers(original, exception="java.io.IOException", letter_format=DeadLetterFormat.SPRING)
    put(servers, letters, headers=spring)
    put(servers, letters)
    for number in range(3):
        put(servers, named_by_spring, headers=origin_headers(original, exception=f"builtins.Error{number}"))

    on_broker("dlq", "replay", letters, "--limit", "2")
    code, out, _ = on_broker("dlq", "ls", letters)
    of_all = on_broker("dlq", "ls", "--all", "--limit", "1")

    first, _, *rows = out.splitlines()
    assert (code, first) == (0, f"{letters}: 7 dead letters")
    # Topic, origin, exception; how many there are, pending and replayed.
    assert [row.split()[:6] for row in rows[:1]] == [[letters, f"{original}:1", "builtins.ValueError", "5", "3", "2"]]
    assert sorted(row.split()[:6] for row in rows[1:]) == [
        [letters, "?", "?", "1", "1", "0"],
        [letters, f"{original}:0", "java.io.IOException", "1", "1", "0"],
    ]
    assert rows[0].count(" UTC") == 2
    lines = of_all.out.splitlines()
    assert (of_all.code, {first, f"{named_by_spring}: 3 dead letters"} <= set(lines)) == (0, True)
    assert not any(line.startswith(f"{original}:") for line in lines)
    assert "more are not shown; see them with --limit" in lines[-1]
    assert len([line for line in lines if line.startswith(" ")]) == 2


def test_show_keeps_the_payload_to_itself_unless_asked(
    on_broker: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    original, letters = dead_letter_topic()
    headers = origin_headers(
        original, partition=3, offset=77, own=[("trace", b"abc"), ("raw", b"\xff"), ("none", None)]
    )
    put(broker.bootstrap_servers, letters, key=b"secret-key", value=b"secret\x1b[2Jvalue", headers=headers)

    code, plain, _ = on_broker("dlq", "show", f"{letters}:0@0")
    _, full, _ = on_broker("dlq", "show", f"{letters}:0@0", "--payload")

    assert code == 0
    assert plain.startswith(f"{letters}:0@0\n")
    assert "  state       pending\n" in plain
    assert f"  from        {original}:3@77\n  group       billing\n  tries       5\n" in plain
    assert "  exception   builtins.ValueError\n" in plain
    assert "  headers     trace\n              raw\n              none\n" in plain
    assert "--payload prints keys, values and texts as well" in plain
    assert not any(word in plain for word in ("secret", "broke", "once", "abc", "0xff"))
    assert "  headers     trace: abc\n              raw: 0xff\n              none: (null)\n" in full
    assert "  message     it \\x1b[31mbroke\n" in full
    assert "  stack       Traceback:\n                at \\x1b[2J once\n" in full
    assert "  key         secret-key\n" in full
    assert "  value       secret\\x1b[2Jvalue\n" in full
    assert "\x1b" not in plain + full


def test_show_finds_the_newest_beyond_transaction_markers_and_one_whose_headers_cannot_be_read(
    on_broker: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    _, letters = dead_letter_topic()
    produce_raw(broker.bootstrap_servers, letters, [(b"k", [(b"\xff", b"the client shows no headers then")])])
    producer = transactional(broker.bootstrap_servers)
    for number in range(4):
        producer.begin_transaction()
        producer.produce(letters, f"letter {number}".encode())
        producer.commit_transaction(60)
    wait_for_markers(broker.bootstrap_servers, letters)

    unreadable = on_broker("dlq", "show", f"{letters}:0@0")
    code, out, _ = on_broker("dlq", "show", letters, "--last", "3", "--payload")
    absent = [on_broker("dlq", "show", f"{letters}:{place}") for place in ("0@99", "7@0")]

    assert (unreadable.code, f"  headers     {HEADERS_LOST}\n" in unreadable.out) == (0, True)
    assert [(outcome.code, "there is no message" in outcome.err) for outcome in absent] == [(1, True)] * 2
    assert code == 0
    values = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  value")]
    assert values == ["letter 1", "letter 2", "letter 3"]
    # The markers did lie in between: five messages end at an offset above four.
    assert read_all(broker.bootstrap_servers, letters)[-1].offset() == 7
