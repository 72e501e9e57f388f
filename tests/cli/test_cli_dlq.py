from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, cast

import pytest
from confluent_kafka import Message
from dead_letter_tools import origin_headers, put

from kafka_tools import read_all, transactional, wait_for_markers
from penstock.dead_letters import reader as dead_letter_log
from penstock.dead_letters.headers import HEADERS_LOST, DeadLetterFormat
from penstock.devbroker import DevBroker

Command = Callable[..., tuple[object, str, str]]
Topics = Callable[..., tuple[str, str]]


@pytest.mark.parametrize("command", ["ls", "show", "replay"])
def test_the_help_of_every_dead_letter_command_ends_with_an_example(penstock_command: Command, command: str) -> None:
    code, out, _ = penstock_command("dlq", command, "--help")

    assert code == 0
    assert out.rstrip().splitlines()[-1].strip().startswith(f"Example: penstock dlq {command}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("ls", "dlq.orders", "--all"),
        ("ls", "dlq.orders", "--limit", "0"),
        ("show", "dlq.orders", "17"),
        ("show", "dlq.orders", "0:-1"),
        ("show", "dlq.orders", "0:\u0661"),
        ("show", "dlq.orders", "0:1", "--last", "2"),
        ("replay", "dlq.orders", "--where", "colour=red"),
        ("replay", "dlq.orders", "--where", "topic="),
        ("replay", "dlq.orders", "--where", "topic=a", "--where", "topic=b"),
        ("replay", "dlq.orders", "--from", "0"),
    ],
)
def test_wrong_use_of_dead_letter_commands_is_told_with_code_2(
    penstock_command: Command, arguments: tuple[str, ...]
) -> None:
    command, *rest = arguments

    code, _, err = penstock_command("dlq", command, "--bootstrap-servers", "127.0.0.1:1", *rest)

    assert code == 2
    assert err
    assert "Traceback" not in err


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("command", [("ls", "--all"), ("show", "dlq.orders"), ("replay", "dlq.orders")])
def test_dead_letter_commands_without_a_broker_end_with_code_3(
    penstock_command: Command, command: tuple[str, ...]
) -> None:
    code, _, err = penstock_command("dlq", *command, "--bootstrap-servers", "127.0.0.1:1")

    assert code == 3
    assert "127.0.0.1:1" in err


@pytest.mark.parametrize("command", ["ls", "show", "replay"])
def test_a_dead_letter_topic_that_does_not_exist_is_an_error(
    penstock_command: Command, broker: DevBroker, command: str
) -> None:
    code, _, err = penstock_command("dlq", command, "dlq.nowhere", "--bootstrap-servers", broker.bootstrap_servers)

    assert code == 1
    assert "no topic dlq.nowhere" in err


def test_an_empty_dead_letter_topic_is_nothing_special(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    _, letters = dead_letter_topic(2)
    servers = ("--bootstrap-servers", broker.bootstrap_servers)

    said = [penstock_command("dlq", command, letters, *servers) for command in ("ls", "show", "replay")]

    assert [code for code, _, _ in said] == [0, 0, 0]
    assert f"{letters}: 0 dead letters" in said[0][1]
    assert f"{letters} is empty" in said[1][1]
    assert f"nothing sent from {letters}" in said[2][1]


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

    code, out, _ = penstock_command("dlq", "ls", letters, "--bootstrap-servers", servers)

    assert code == 0
    first, _, *rows = out.splitlines()
    assert first == f"{letters}: 7 dead letters"
    assert sorted(row.split()[:4] for row in rows) == [
        ["1", letters, "?", "?"],
        ["1", letters, original, "0"],
        ["5", letters, original, "1"],
    ]
    assert "builtins.ValueError" in rows[0]
    assert sum("java.io.IOException" in row for row in rows) == 1
    assert rows[0].split()[0] == "5"
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
    assert "more rows" in lines[-1]
    assert len([line for line in lines if line.lstrip()[:1].isdigit()]) == 1


def test_show_keeps_the_payload_to_itself_unless_asked(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Topics
) -> None:
    original, letters = dead_letter_topic()
    headers = origin_headers(
        original, partition=3, offset=77, own=[("trace", b"abc"), ("raw", b"\xff"), ("none", None)]
    )
    put(broker.bootstrap_servers, letters, key=b"secret-key", value=b"secret\x1b[2Jvalue", headers=headers)
    servers = ("--bootstrap-servers", broker.bootstrap_servers)

    code, plain, _ = penstock_command("dlq", "show", letters, "0:0", *servers)
    _, full, _ = penstock_command("dlq", "show", letters, "0:0", "--payload", *servers)

    assert code == 0
    assert f"from       {original} 3:77" in plain
    assert "group      billing" in plain
    assert "tries      5" in plain
    assert "exception  builtins.ValueError" in plain
    assert "    trace\n    raw\n    none\n" in plain
    assert "message    (shown with --payload)" in plain
    assert not any(word in plain for word in ("secret", "broke", "once", "abc", "0xff"))
    assert "    trace  abc\n    raw  0xff\n    none  (null)\n" in full
    assert "message    it \\x1b[31mbroke" in full
    assert "    Traceback:\n      at \\x1b[2J once\n" in full
    assert "key        secret-key" in full
    assert "value      secret\\x1b[2Jvalue" in full
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

    code, out, _ = penstock_command(
        "dlq", "show", letters, "--last", "3", "--payload", "--bootstrap-servers", broker.bootstrap_servers
    )

    assert code == 0
    values = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  value")]
    assert values == ["letter 1", "letter 2", "letter 3"]
    # The markers did lie in between: four messages end at an offset above four.
    assert read_all(broker.bootstrap_servers, letters)[-1].offset() == 6


@pytest.mark.parametrize("place", ["0:5", "7:0"])
def test_show_says_where_there_is_no_message(
    penstock_command: Command, broker: DevBroker, dead_letter_topic: Topics, place: str
) -> None:
    _, letters = dead_letter_topic()
    put(broker.bootstrap_servers, letters)

    code, _, err = penstock_command("dlq", "show", letters, place, "--bootstrap-servers", broker.bootstrap_servers)

    assert code == 1
    assert "there is no message" in err


def test_a_letter_with_a_header_name_that_is_not_utf_8_is_read_without_its_headers() -> None:
    class Unreadable:
        def headers(self) -> NoReturn:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

        def timestamp(self) -> tuple[int, int]:
            return 1, 5

        def topic(self) -> str:
            return "dlq.orders"

        def key(self) -> bytes:
            return b"k"

        partition = offset = staticmethod(lambda: 3)
        value = key

    letter = dead_letter_log._letter(cast("Message", Unreadable()))

    assert letter.place == "dlq.orders[3]@3"
    assert letter.origin is None
    assert [name for name, _ in letter.headers] == [HEADERS_LOST]
