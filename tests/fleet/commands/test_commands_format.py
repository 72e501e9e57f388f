"""Records of commands and of the audit: what is written is read, and whatever else is there is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigurationError, MessageFormatError
from penstock.fleet.commands import audit
from penstock.fleet.commands.audit import AuditRecord, Kind, decode_audit, encode_audit
from penstock.fleet.commands.command import MOST_BYTES, Command, decode_command, encode_command
from penstock.fleet.commands.sender import summary
from penstock.fleet.wire import SIGNATURE, is_signed, signature
from penstock.fleet_member import CommandSettings, Outcome, command_settings

TEXTS = st.text(max_size=200)
NAMES = st.text(min_size=1, max_size=200)
NUMBERS = st.integers(0, (1 << 63) - 1)
TRANSACTION = "018f4e9c-5c1e-7abc-8def-0123456789ab"
PLACES = st.fixed_dictionaries({"topic": NAMES}, optional={"partition": NUMBERS})
MESSAGES = st.fixed_dictionaries({"topic": NAMES, "partition": NUMBERS, "offset": NUMBERS})
SETTLED = st.fixed_dictionaries(
    {"transaction_id": st.just(TRANSACTION), "decision": st.sampled_from(["commit", "rollback", "discard"])}
)
PARAMETERS = {
    "pause": PLACES,
    "resume": PLACES,
    "stacks": st.just({}),
    "give-up": MESSAGES,
    "settle": SETTLED,
    "resume-transaction": st.just({"transaction_id": TRANSACTION}),
}
COMMANDS = st.one_of(
    *(
        st.builds(Command, st.just(name), NAMES, NAMES | st.none(), parameters, TEXTS, NUMBERS)
        for name, parameters in PARAMETERS.items()
    )
)
RECORDS = st.builds(
    AuditRecord,
    kind=st.sampled_from(Kind),
    id=st.just("ab" * 16),
    name=st.text(),
    parameters=st.just({"partition": 3}),
    by=st.text(),
    host=st.text(),
    at_ms=NUMBERS,
    outcome=st.sampled_from(Outcome) | st.none(),
    said=st.text(),
    details=st.text() | st.none(),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
PAUSE = encode_command(Command("pause", "sms", None, {"topic": "orders"}))
GIVE_UP = encode_command(Command("give-up", "sms", None, {"topic": "orders", "partition": 0, "offset": 5}))
SETTLE = encode_command(Command("settle", "s", None, {"transaction_id": TRANSACTION, "decision": "commit"}))
FIELDS = st.sampled_from(["version", "id", "name", "group", "member", "parameters", "by", "asked_ms", "said", "kind"])


@given(COMMANDS)
def test_a_command_is_read_as_it_was_written(command: Command) -> None:
    value = encode_command(command)

    assert decode_command(value) == command
    assert len(value) <= MOST_BYTES


@given(st.binary(max_size=400) | JSON.map(lambda one: json.dumps(one).encode()))
def test_bytes_that_are_no_record_are_refused_and_raise_nothing_else(value: bytes) -> None:
    for decode in (decode_command, decode_audit):
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


def test_stacks_that_are_too_large_are_cut_and_the_record_is_read() -> None:
    for character in ("x", "\U0001f600"):
        record = AuditRecord(
            Kind.ANSWER, "ab" * 16, "stacks", {}, "one", "here", 1, Outcome.DONE, "the stacks", character * 1_000_000
        )

        assert len(encode_audit(record)) <= audit.MOST_BYTES
        assert decode_audit(encode_audit(record)).said == "the stacks"


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
