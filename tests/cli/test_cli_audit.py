"""`penstock audit`: one line for each record, with all planted text escaped."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from commands import Command
from penstock.devbroker import DevBroker
from penstock.fleet.commands.audit import AuditRecord, AuditWriter, Kind
from penstock.fleet_member import CommandSettings, Outcome

PLANTED = "<script>alert(1)</script>\x1b[2J\r\n2026-01-01 forged'; DROP TABLE audit;--"


def record(kind: Kind, number: int, **fields: str) -> AuditRecord:
    outcome = None if kind is Kind.ASKED else Outcome.DONE
    return AuditRecord(
        kind, f"{number:032x}", "pause", {"topic": PLANTED}, "somebody", "here", number, outcome, **fields
    )


@pytest.mark.thorough
def test_what_was_done_is_printed_a_line_each_and_nothing_planted_runs(
    broker: DevBroker, new_topic: Callable[..., str], penstock_command: Command
) -> None:
    topic = new_topic(2)
    writer = AuditWriter(broker.bootstrap_servers, {}, CommandSettings(audit_topic=topic))
    writer.append(record(Kind.ASKED, 1), b"sms")
    writer.append(record(Kind.ANSWER, 1, said=PLANTED, details=f"penstock-poll-sms:\n  {PLANTED}"), b"sms")
    writer.write(topic, b"\xff garbage", b"sms")
    writer.append(record(Kind.OUTCOME, 1, said="paused"), b"sms")
    at = ("--bootstrap-servers", broker.bootstrap_servers, "--audit-topic", topic)

    code, out, _ = penstock_command("audit", *at)
    _, detailed, _ = penstock_command("audit", "--details", *at)
    _, as_json, _ = penstock_command("audit", "--json", "--last", "1", *at)
    missing = penstock_command("audit", "--bootstrap-servers", broker.bootstrap_servers, "--audit-topic", "none-such")

    assert (code, len(out.splitlines())) == (0, 4)
    assert out.splitlines()[0].startswith("1970-01-01 00:00:00 00000000 pause asked by somebody [topic=<script>")
    assert "\x1b" not in out + detailed + as_json
    assert r"\x1b[2J\r\n2026-01-01 forged" in out
    assert "1 record ignored: not about actions" in out
    assert "penstock-poll-sms:" in detailed
    assert [record["said"] for record in json.loads(as_json)["records"]] == ["paused"]
    assert (missing.code, "no such topic" in missing.err) == (1, True)
