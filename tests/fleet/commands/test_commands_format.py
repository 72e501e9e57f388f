"""Records of commands and of the audit: written ones are readable, all others are refused."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import JSON

from penstock.errors import ConfigurationError, MessageFormatError
from penstock.fleet.commands import audit
from penstock.fleet.commands.audit import AuditRecord, Kind, decode_audit, encode_audit
from penstock.fleet.commands.command import MOST_BYTES, Command, decode_command, encode_command
from penstock.fleet.commands.sender import summary
from penstock.fleet.reports.report import decode_report
from penstock.fleet.wire import SIGNATURE, is_signed, signature
from penstock.fleet_member import CommandSettings, Outcome, command_settings

TEXTS = st.text(max_size=200)
NAMES = st.text(min_size=1, max_size=200)
NUMBERS = st.integers(0, (1 << 63) - 1)
TRANSACTION = "018f4e9c-5c1e-7abc-8def-0123456789ab"
#: One of each that members get.
KNOWN = {
    "pause": {"topic": "orders"},
    "resume": {"topic": "orders", "partition": 3},
    "stacks": {},
    "give-up": {"topic": "orders", "partition": 0, "offset": 5},
    "settle": {"transaction_id": TRANSACTION, "decision": "commit"},
    "resume-transaction": {"transaction_id": TRANSACTION},
}
COMMANDS = st.builds(
    lambda known, *more: Command(known[0], more[0], more[1], known[1], *more[2:]),
    st.sampled_from(sorted(KNOWN.items())),
    *(NAMES, NAMES | st.none(), TEXTS, NUMBERS),
)
PAUSE, GIVE_UP, SETTLE = (encode_command(Command(it, "sms", None, KNOWN[it])) for it in ("pause", "give-up", "settle"))
RECORDS = st.builds(
    AuditRecord,
    id=st.just("ab" * 16),
    parameters=st.just({"partition": 3}),
    at_ms=NUMBERS,
    outcome=...,
    said=...,
    # Stacks may be large, and take more bytes than characters.
    details=st.none() | st.text() | st.sampled_from(["x" * 1_000_000, "\U0001f600" * 1_000_000]),
)
FIELDS = st.sampled_from(["version", "id", "name", "group", "member", "parameters", "by", "asked_ms", "said", "kind"])


@given(COMMANDS)
def test_a_command_is_read_as_it_was_written(command: Command) -> None:
    value = encode_command(command)

    assert decode_command(value) == command
    assert len(value) <= MOST_BYTES


@given(st.binary(max_size=400) | JSON.map(lambda one: json.dumps(one).encode()))
def test_bytes_that_are_no_record_are_refused_and_raise_nothing_else(value: bytes) -> None:
    for decode in (decode_command, decode_audit, partial(decode_report, b'["sms", "host-1"]')):
        with pytest.raises(MessageFormatError):
            decode(value)


@given(COMMANDS, FIELDS, JSON)
def test_a_command_with_a_forged_field_is_read_or_refused_and_raises_nothing_else(
    command: Command, name: str, forged: object
) -> None:
    value = json.dumps({**json.loads(encode_command(command)), name: forged}).encode()
    try:
        read = decode_command(value)
    except MessageFormatError:
        return
    assert isinstance(read, Command)


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"[" * 7000,
        b'{"version":1,"id":"' + b"a" * 9000 + b'"}',
        PAUSE.replace(b'"version": 1', b'"version": 2'),
        PAUSE.replace(b'"pause"', b'"shut-down"'),
        PAUSE.replace(b'"pause"', b'"offsets"'),  # which no member does
        GIVE_UP.replace(b"5}", b"-5}"),
        SETTLE.replace(b"commit", b"forget"),
        SETTLE.replace(b"transaction_id", b"id"),
        SETTLE.replace(TRANSACTION.encode(), b"1"),
    ],
)
def test_what_could_be_taken_for_a_command_is_refused(value: bytes | None) -> None:
    with pytest.raises(MessageFormatError):
        decode_command(value)


@given(RECORDS)
def test_a_record_of_the_audit_is_read_as_it_was_written_save_that_texts_are_cut(record: AuditRecord) -> None:
    value = encode_audit(record)
    read = decode_audit(value)

    assert len(value) <= audit.MOST_BYTES
    assert (read.kind, read.id, read.outcome, read.at_ms) == (record.kind, record.id, record.outcome, record.at_ms)
    assert record.said.startswith(read.said)


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_a_signature_is_of_one_record_one_topic_and_one_token(value: bytes, other: bytes) -> None:
    signed = [(SIGNATURE, signature("t" * 16, "commands", value))]

    assert is_signed("t" * 16, "commands", value, signed)
    assert not is_signed("u" * 16, "commands", value, signed)
    assert not is_signed("t" * 16, "audit", value, signed)
    assert is_signed("t" * 16, "commands", other, signed) == (value == other)
    for headers in (None, [], [(SIGNATURE, None)], [(SIGNATURE, "text")], {SIGNATURE: b""}):
        assert not is_signed("t" * 16, "commands", value, headers)


def test_the_worst_answer_tells_what_came_of_a_command() -> None:
    command = Command("pause", "sms", None, {"topic": "orders", "partition": 3})

    def answer(member: str, outcome: Outcome) -> AuditRecord:
        return AuditRecord(Kind.ANSWER, command.id, "pause", {}, member, "here", 1, outcome, f"it is {outcome.value}")

    done, refused = answer("one", Outcome.DONE), answer("two", Outcome.REFUSED)
    assert summary(command, [done]) == (Outcome.DONE, "pause orders:3: one: it is done")
    assert summary(command, [done, refused])[0] is Outcome.REFUSED
    assert summary(command, [done], ["one", "two"]) == (
        Outcome.SENT,
        "pause orders:3: one: it is done; no answer in time from two",
    )
    assert summary(command, [])[0] is Outcome.SENT
    give_up = Command("give-up", "sms", None, {"topic": "orders", "partition": 3, "offset": 5})
    assert summary(give_up, [refused, done], ["one", "two"]) == (
        Outcome.DONE,  # one has it, and the others do not
        "give-up orders:3@5: one: it is done",
    )


def test_a_token_comes_from_the_environment_shows_nowhere_and_is_not_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_COMMANDS_TOKEN", "a-token-of-some-length")

    assert CommandSettings().with_token().token == "a-token-of-some-length"  # noqa: S105 - no secret
    assert "length" not in repr(CommandSettings().with_token())
    monkeypatch.setenv("PENSTOCK_COMMANDS_TOKEN", "short")
    with pytest.raises(ConfigurationError, match="16 characters at least"):
        CommandSettings().with_token()
    with pytest.raises(ConfigurationError, match="name two topics"):
        CommandSettings(topic="a", audit_topic="a")
    with pytest.raises(ConfigurationError, match=r"commands must be True, False or penstock.CommandSettings"):
        command_settings("yes")  # type: ignore[arg-type] # what a user may give
