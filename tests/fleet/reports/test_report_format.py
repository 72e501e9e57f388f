"""Reports as values: their limits, refused ones, and silent members."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import JSON, partition, planted, report

from penstock.cli.output import Result, show
from penstock.cli.status import explained, group_lines
from penstock.consumer.poll.explain import Explanation
from penstock.errors import ConfigurationError, MessageFormatError
from penstock.fleet.page.problems import problems_of
from penstock.fleet.reports.group_state import Group, GroupStates, Member
from penstock.fleet.reports.report import MOST_BYTES, decode_report, encode_report, key_hash, read_key, total_lag
from penstock.fleet.wire import NewerRecordError
from penstock.fleet_member import ReportSettings, Sender, report_settings

SENDER = Sender("sms", "host-1", "host", 4711)
NUMBERS = {"sequence": 1, "interval_s": 2.0, "uptime_s": 5.0}


def report_of_member(name: str, *numbers: int, sequence: int = 1, **parsed: object) -> tuple[bytes, bytes]:
    """Return the record of a report of a member of `sms` that has these partitions."""
    sender = Sender("sms", name, "host", 1)
    description = {"partitions": [partition("orders", number) for number in numbers], **parsed}
    return sender.key, encode_report(sender, description, {}, {**NUMBERS, "sequence": sequence})


def printed(group: Group) -> list[str]:
    """Return what `penstock status` prints below its table, and `penstock explain --reports`."""
    lines = [*group_lines(group, problems_of(group)), *(line for member in group.members for line in explained(member))]
    with redirect_stdout(StringIO()) as out:
        show(Result(lines=lines), as_json=False)
    return out.getvalue().splitlines()


def test_what_was_reported_is_read_again() -> None:
    pending = {"id": "0" * 36, "prefix": "shop", "group": "checkout", "topics": "orders, payments", "checks": 3}
    pending |= {"age": 9.5, "waits_for": "topic refunds, which does not exist"}
    operator = {"store": "other", "group": "shop.coordinator", "member": "vm-1"}
    said = report(
        "sms",
        "host-1",
        partitions=[partition("orders", 3, blocking_offset=48_262, state="in handler", age=12.3456)],
        counts={"handled": 7, "pauses": {"byte limit": 2}},
        parked=[{"topic": "orders", "partition": 3, "offset": 9, "handler": "store", "state": "held", "attempt": 5}],
        sinks=[{"name": "lake", "state": "running", "batch_id": 3, "rows": 10, "lag": None, "partitions": ()}],
        coordinator={
            "counts": {"pending": 50, "missing_rights": ()},
            "waits": ["topic x takes nothing"],
            "transactions": [pending] * 50,
            "operator": operator,
        },
    )

    [parsed] = said.partitions
    assert (parsed["age"], parsed["state"], parsed["parked"], parsed["lag"]) == (12.346, "in handler", 0, 12)
    assert (said.counts, said.pauses, said.coordinator) == ({"handled": 7}, {"byte limit": 2}, {"pending": 50})
    assert (len(said.transactions), said.operator) == (50, operator)
    assert (said.parked[0]["attempt"], said.sinks[0]["batch_id"], said.waits) == (5, 3, ["topic x takes nothing"])


def test_every_field_of_an_explanation_is_in_a_report() -> None:
    whole = Explanation("orders", 3, 5, 9, 4, 1, 400, 7, "by the app", "store", 2, 5, "parked", None, 2, 1.5, 0.5, 10.0)
    fields = {name: getattr(whole, name) for name in Explanation.__slots__}

    [parsed] = report("sms", "host-1", partitions=[fields | {"topic": "orders", "partition": 3}]).partitions

    assert set(Explanation.__dataclass_fields__) - {"key"} == set(parsed) - {"key_hash"}


def test_a_report_of_a_thousand_partitions_is_bounded_and_says_what_was_left_out() -> None:
    worst = partition("orders", 999, state="dead letter", blocking_offset=1, detail="d" * 10_000, age=3.0)
    missing = partition("orders", 998, trouble="t" * 10_000)
    parked = [{"topic": "orders", "partition": 1, "offset": n, "key": "k" * 999} for n in range(5_000)]
    described = {"partitions": [*(partition("orders", n) for n in range(998)), worst, missing], "parked": parked}

    value = encode_report(SENDER, described, {}, NUMBERS)

    said = decode_report(SENDER.key, value)
    assert len(value) <= MOST_BYTES
    assert [one["partition"] for one in said.partitions[:2]] == [998, 999]
    assert len(said.partitions) > 200
    assert said.left_out["partitions"] == 1_000 - len(said.partitions)
    assert (said.partition_count, said.lag) == (1_000, 12_000)
    shown = printed(Group("sms", [Member(said, 0.5, is_silent=False)]))
    assert f"{said.left_out['partitions']:.0f} partitions more" in "\n".join(shown)


def test_the_lag_of_a_group_is_known_although_it_gives_a_member_no_partition() -> None:
    some = report("sms", "one", partitions=[partition("orders", 1)])
    states = ("no partition", "shut out")
    none, out = (report("sms", it, partitions=[partition("orders", -1, state=it, lag=None)]) for it in states)

    assert [total_lag(given) for given in ([some, none], [none], [some, out])] == [12, None, None]


@pytest.mark.parametrize("count", [0, 30])
@pytest.mark.parametrize("text", ["", "long" * 3_000, "\U0001f600" * 5_000, "\ud800" * 5_000, '"\\\x00' * 2_000])
def test_no_texts_make_a_report_larger_than_its_limit(text: str, count: int) -> None:
    described = {
        "partitions": [partition(text, n, detail=text, trouble=text) for n in range(count)],
        "sinks": [{"name": text, "state": text, "last_error": text}] * count,
        "coordinator": {"counts": {}, "waits": [text] * count},
    }
    sender = Sender(text[:250], text[:250], text[:250], 1)

    value = encode_report(sender, described, {}, NUMBERS)

    assert len(value) <= MOST_BYTES
    assert decode_report(sender.key, value).group == text[:250]


def test_keys_are_hashed_and_never_shown() -> None:
    described = {"partitions": [partition("orders", 1, key="a secret key")], "parked": []}

    value = encode_report(SENDER, described, {}, NUMBERS)

    assert b"a secret key" not in value
    assert decode_report(SENDER.key, value).partitions[0]["key_hash"] == key_hash("a secret key", "sms")
    assert key_hash("a secret key", "sms") != key_hash("a secret key", "another")


VALID = encode_report(
    SENDER, {"partitions": [partition("orders", 1)], "parked": [], "counts": {"handled": 1}}, {}, NUMBERS
)


@given(st.dictionaries(st.sampled_from([*json.loads(VALID), "sinks", "coordinator", "waits", "left_out"]), JSON))
def test_a_forged_report_is_read_or_refused_and_can_be_shown(forged: dict[str, Any]) -> None:
    states = GroupStates()
    value = json.dumps(json.loads(VALID) | forged).encode()

    states.add(SENDER.key, value, 100.0, 100.0)

    shown = [line for group in states.groups(100.0) for line in printed(group)]
    assert len(shown) > 0 or states.ignored.total() == 1
    assert all(line.isprintable() for line in shown)


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 60_000,
        b'{"version": 1' + b" " * MOST_BYTES,
        b'{"version": 1e999}',
        VALID.replace(b'"host-1"', b'"another"'),
        VALID.replace(b'"uptime_s":5.0', b'"uptime_s":NaN'),
        VALID.replace(b'"partition":1', b'"partition":' + b"9" * 5_000),
        b"9" * 5_000,
        *(
            json.dumps({**json.loads(VALID), "operator": forged}).encode()
            for forged in ([], "x", {"store": 5}, dict.fromkeys(map(str, range(99)), "x"), {"store": "x" * 9_000})
        ),
    ],
)
def test_what_is_no_report_of_its_key_is_refused(value: bytes) -> None:
    with pytest.raises(MessageFormatError):
        decode_report(SENDER.key, value)


def test_a_key_of_a_report_names_group_and_member_or_is_refused() -> None:
    assert read_key(SENDER.key) == ("sms", "host-1")
    for key in (None, b"\xff", b"{}", b'["sms"]', b'["sms", 5]', b"[" * 9_000):
        with pytest.raises(MessageFormatError):
            read_key(key)


def test_a_report_of_a_later_version_is_refused_by_its_own_error_and_new_fields_are_passed_over() -> None:
    said = json.loads(VALID)
    with pytest.raises(NewerRecordError):
        decode_report(SENDER.key, json.dumps(said | {"version": 2}).encode())

    said["partitions"][0]["new"] = said["new"] = {"deep": [1]}
    assert decode_report(SENDER.key, json.dumps(said).encode()) == decode_report(SENDER.key, VALID)


def test_what_a_terminal_might_obey_is_escaped() -> None:
    shown = printed(planted("\x1b[31m\r\n\x9b<script>\u202e'; DROP TABLE"))

    assert all(line.isprintable() for line in shown)
    assert sum("<script>" in line for line in shown) >= 5


def test_a_member_is_silent_by_the_brokers_clock_and_its_own_interval_and_not_while_no_broker_is_heard() -> None:
    states = GroupStates()

    def silent(at: float) -> list[bool]:
        return [member.is_silent for group in states.groups(at) for member in group.members]

    states.add(*report_of_member("one"), 1_000.0, 50.0)
    states.add(*report_of_member("two"), 1_005.0, 50.1)
    states.note_caught_up(50.1)
    assert (silent(50.1), states.is_settled(50.1)) == ([False, False], False)

    states.add(*report_of_member("two"), 1_007.5, 52.6)
    assert (silent(52.6), states.is_settled(52.6)) == ([True, False], True)
    assert states.groups(52.6)[0].members[0].age_s == pytest.approx(7.5)

    assert silent(900.0) == [True, False]
    states.note_answer(900.0)
    assert silent(900.0) == [True, True]
    # After a day it is forgotten, and at once where it takes itself out.
    states.note_answer(50.0 + 25 * 3600)
    assert states.groups(50.0 + 25 * 3600) == []
    key, value = report_of_member("one")
    states.add(key, value, 200_000.0, 200_000.0)
    states.add(key, None, 200_001.0, 200_001.0)
    assert states.groups(200_001.0) == []


def test_a_silent_member_is_missed_until_the_living_have_all_that_it_had() -> None:
    states = GroupStates()
    lake = {"sinks": [{"name": "lake", "state": "running"}]}
    for key, value in (report_of_member("dead", 1, 2, **lake), report_of_member("idle")):
        states.add(key, value, 1_000.0, 50.0)

    def missed(at: float, *living: tuple[bytes, bytes]) -> list[str]:
        for key, value in living:
            states.add(key, value, 950.0 + at, at)
        return [member.report.member for member in states.groups(at)[0].members if member.is_missed]

    assert missed(50.0) == []
    assert missed(60.0, report_of_member("one", 1)) == ["dead"]
    assert missed(61.0, report_of_member("one", 1), report_of_member("two", 2)) == ["dead"]
    assert missed(62.0, report_of_member("two", 2, **lake)) == []
    assert missed(99.0, report_of_member("three", 3)) == ["dead", "one", "two"]  # "idle" had nothing


def test_a_flood_of_members_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fleet.reports.group_state._MOST_MEMBERS", 10)
    states = GroupStates()
    for number in range(25):
        states.add(*report_of_member(f"m{number}"), 1.0, 1.0)

    assert (len(states.groups(1.0)[0].members), states.ignored["too many"]) == (10, 15)
    states.add(*report_of_member("m0", sequence=2), 2.0, 2.0)
    assert states.groups(2.0)[0].members[0].report.sequence == 2


def test_wrong_settings_are_refused() -> None:
    assert report_settings(given=False) is None
    assert report_settings(given=True) == ReportSettings()
    for wrong in ({"interval": 0.0}, {"interval": 61.0}, {"topic": ""}):
        with pytest.raises(ConfigurationError):
            ReportSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        report_settings("yes")  # type: ignore[arg-type]
