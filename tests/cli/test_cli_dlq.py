from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
from confluent_kafka import Message
from dead_letter_tools import origin_headers, put

from kafka_tools import read_all, transactional, wait_for_markers
from penstock.dead_letters import reader as dead_letter_log
from penstock.dead_letters.headers import DeadLetterFormat, DeadLetterOrigin
from penstock.devbroker import DevBroker
from penstock.message import HEADERS_LOST

Command = Callable[..., tuple[object, str, str]]
Topics = Callable[..., tuple[str, str]]


@pytest.mark.parametrize(
    ("command", "says"), [("ls", "{}: 0 dead letters"), ("show", "{} is empty"), ("replay", "nothing sent from {}")]
)
def test_an_empty_dead_letter_topic_is_nothing_special_and_one_that_does_not_exist_is_an_error(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Topics, command: str, says: str
) -> None:
    _, letters = dead_letter_topic(2)
    servers = ("--bootstrap-servers", broker.bootstrap_servers)

    empty_code, empty, _ = penstock_command("dlq", command, letters, *servers)
    code, _, err = penstock_command("dlq", command, "dlq.nowhere", *servers)

    assert (empty_code, says.format(letters) in empty) == (0, True)
    assert (code, "no topic dlq.nowhere" in err) == (1, True)


def test_ls_counts_by_origin_and_exception_in_both_formats(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    original, letters = dead_letter_topic(2)
    servers = broker.bootstrap_servers
    put(servers, letters, headers=origin_headers(original, partition=1), partition=0, count=3)
    put(servers, letters, headers=origin_headers(original, partition=1), partition=1, count=2)
    spring = origin_headers(original, exception="java.io.IOException", letter_format=DeadLetterFormat.SPRING)
    put(servers, letters, headers=spring)
    put(servers, letters)

    penstock_command("dlq", "replay", letters, "--bootstrap-servers", servers, "--limit", "2")
    code, out, _ = penstock_command("dlq", "ls", letters, "--bootstrap-servers", servers)

    assert code == 0
    first, _, *rows = out.splitlines()
    assert first == f"{letters}: 7 dead letters"
    # Topic, origin, exception; how many there are, pending and replayed.
    assert [row.split()[:6] for row in rows[:1]] == [[letters, f"{original}:1", "builtins.ValueError", "5", "3", "2"]]
    assert sorted(row.split()[:6] for row in rows[1:]) == [
        [letters, "?", "?", "1", "1", "0"],
        [letters, f"{original}:0", "java.io.IOException", "1", "1", "0"],
    ]
    assert rows[0].count(" UTC") == 2


def test_ls_of_all_finds_topics_by_both_names_and_prints_so_many_rows(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    servers = broker.bootstrap_servers
    original, kafka = dead_letter_topic()
    _, spring = dead_letter_topic(name="{}-dlt")
    for number in range(3):
        put(servers, spring, headers=origin_headers(original, exception=f"builtins.Error{number}"))

    code, out, _ = penstock_command("dlq", "ls", "--all", "--limit", "1", "--bootstrap-servers", servers)

    lines = out.splitlines()
    assert code == 0
    assert f"{kafka}: 0 dead letters" in lines
    assert f"{spring}: 3 dead letters" in lines
    assert not any(line.startswith(f"{original}:") for line in lines)
    assert "more are not shown; see them with --limit" in lines[-1]
    assert len([line for line in lines if line.startswith(" ")]) == 2


def test_show_keeps_the_payload_to_itself_unless_asked(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    original, letters = dead_letter_topic()
    headers = origin_headers(
        original, partition=3, offset=77, own=[("trace", b"abc"), ("raw", b"\xff"), ("none", None)]
    )
    put(broker.bootstrap_servers, letters, key=b"secret-key", value=b"secret\x1b[2Jvalue", headers=headers)
    servers = ("--bootstrap-servers", broker.bootstrap_servers)

    code, plain, _ = penstock_command("dlq", "show", f"{letters}:0@0", *servers)
    _, full, _ = penstock_command("dlq", "show", f"{letters}:0@0", "--payload", *servers)

    assert code == 0
    assert plain.startswith(f"{letters}:0@0\n")
    assert "  state       pending\n" in plain
    assert f"  from        {original}:3@77\n  group       billing\n  tries       5\n" in plain
    assert "  exception   builtins.ValueError\n" in plain
    assert "  headers     trace\n              raw\n              none\n" in plain
    assert "values and texts are shown with --payload" in plain
    assert not any(word in plain for word in ("secret", "broke", "once", "abc", "0xff"))
    assert "  headers     trace: abc\n              raw: 0xff\n              none: (null)\n" in full
    assert "  message     it \\x1b[31mbroke\n" in full
    assert "  stack       Traceback:\n                at \\x1b[2J once\n" in full
    assert "  key         secret-key\n" in full
    assert "  value       secret\\x1b[2Jvalue\n" in full
    assert "\x1b" not in plain + full


def test_show_finds_the_newest_beyond_transaction_markers(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    _, letters = dead_letter_topic()
    producer = transactional(broker.bootstrap_servers)
    for number in range(4):
        producer.begin_transaction()
        producer.produce(letters, f"letter {number}".encode())
        producer.commit_transaction(20)
    wait_for_markers(broker.bootstrap_servers, letters)

    servers = ("--bootstrap-servers", broker.bootstrap_servers)
    code, out, _ = penstock_command("dlq", "show", letters, "--last", "3", "--payload", *servers)
    absent = [penstock_command("dlq", "show", f"{letters}:{place}", *servers) for place in ("0@99", "7@0")]

    assert [(code, "there is no message" in err) for code, _, err in absent] == [(1, True)] * 2
    assert code == 0
    values = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  value")]
    assert values == ["letter 1", "letter 2", "letter 3"]
    # The markers did lie in between: four messages end at an offset above four.
    assert read_all(broker.bootstrap_servers, letters)[-1].offset() == 6


def test_a_letter_with_a_header_name_that_is_not_utf_8_is_read_without_its_headers() -> None:
    def headers() -> NoReturn:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    place = {"topic": lambda: "dlq.orders", "partition": lambda: 3, "offset": lambda: 3, "timestamp": lambda: (1, 5)}
    unreadable = SimpleNamespace(headers=headers, key=lambda: b"k", value=lambda: b"v", **place)

    letter = dead_letter_log._letter(cast("Message", unreadable))

    assert letter.place == "dlq.orders:3@3"
    assert letter.origin == DeadLetterOrigin()
    assert [name for name, _ in letter.headers] == [HEADERS_LOST]
