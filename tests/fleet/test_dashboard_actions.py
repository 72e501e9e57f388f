"""Actions from their request to their effect, on a real broker with two members, each in the audit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from action_tools import OF_COMMANDS, TOKEN, act
from tenacity import wait_fixed

import penstock
from kafka_tools import produce
from penstock.devbroker import DevBroker
from penstock.fleet import Address, Dashboard
from penstock.fleet.commands.audit import AuditRecord, Kind, audit_records
from penstock.fleet_member import CommandSettings, Outcome
from waiting import wait_until


@dataclass
class Shop:
    """Two members of a group that hear commands, and where actions are asked for."""

    broker: DevBroker
    topic: str
    commands: CommandSettings
    address: str
    members: dict[str, penstock.RunningApp]

    def send(self, *values: bytes, partition: int = 0) -> None:
        produce(self.broker.bootstrap_servers, self.topic, [(b"1", value) for value in values], partition=partition)

    def owner(self, partition: int) -> str:
        """Return the member that has a partition."""

        def find() -> str | None:
            for name, one in self.members.items():
                if any((each.topic, each.partition) == (self.topic, partition) for each in one.explain()):
                    return name
            return None

        return wait_until(find, 90)  # type: ignore[return-value] # not None then

    def explained(self, partition: int) -> penstock.Explanation:
        running = self.members[self.owner(partition)]
        return next(one for one in running.explain() if one.partition == partition)

    def audit(self, identity: str | None = None) -> list[AuditRecord]:
        """Return the records of an action, or of all."""
        every = audit_records(self.broker.bootstrap_servers, {}, self.commands.audit_topic, 1000)
        return [record for record in every if record is not None and identity in {None, record.id}]


@pytest.fixture(scope="module")
def shop(broker: DevBroker, topic_numbers: Iterator[int]) -> Iterator[Shop]:
    number = next(topic_numbers)
    topic = f"shop-{number}"
    commands = CommandSettings(f"shop-commands-{number}", f"shop-audit-{number}", OF_COMMANDS)
    reports = penstock.ReportSettings(f"shop-reports-{number}", interval=0.5)
    with ExitStack() as parts:
        broker.create_topic(topic, 2)
        members = {}
        for instance in ("one", "two"):
            app = penstock.App(
                topic,
                bootstrap_servers=broker.bootstrap_servers,
                commands=commands,
                report=reports,
                commit_interval=0.2,
                config={"group.instance.id": instance, "heartbeat.interval.ms": "500"},
            )

            @app.handler(topic, retry=penstock.retry(attempts=99, wait=wait_fixed(600)))
            def handle(message: penstock.Message) -> None:
                if message.value == b"bad":
                    raise ValueError("no good")

            members[instance] = parts.enter_context(app.start())
        for member in members.values():
            assert member._listener is not None
            assert member._listener.is_listening.wait(60)
        at, given = Address("127.0.0.1", 0), {"token": TOKEN, "commands": commands}
        page = parts.enter_context(Dashboard(broker.bootstrap_servers, at, topic=reports.topic, **given))
        address = f"http://{page.address}"
        # It knows from reports who listens.
        pause = {"group": topic, "topic": topic, "dry_run": True}
        wait_until(lambda: "that listen (one, two)" in act(address, "pause", **pause)[1]["said"], 120)
        made = Shop(broker, topic, commands, address, members)
        wait_until(lambda: made.owner(0) != made.owner(1), 120)
        yield made


def test_all_members_pause_a_topic_and_go_on_and_the_audit_tells_who_asked(shop: Shop) -> None:
    would = act(shop.address, "pause", group=shop.topic, topic=shop.topic, dry_run=True)
    before = [shop.explained(number).paused for number in (0, 1)]

    status, paused = act(shop.address, "pause", group=shop.topic, topic=shop.topic)

    assert would == (
        200,
        {
            "outcome": "done",
            "said": f"{shop.topic} would be paused for all members of {shop.topic} that listen (one, two): what was "
            "taken in is finished, and nothing more fetched until it is resumed, or the process starts again",
        },
    )
    assert before == [None, None]
    assert (status, paused["outcome"]) == (200, "done")
    assert all("by the app" in str(shop.explained(number).paused) for number in (0, 1))
    audited, by = shop.audit(paused["id"]), "127.0.0.1 by the dashboard"
    by_kind = sorted((record.kind.value, record.by) for record in audited)
    assert by_kind == [("answer", "one"), ("answer", "two"), ("asked", by), ("outcome", by)]
    assert act(shop.address, "resume", group=shop.topic, topic=shop.topic)[1]["outcome"] == "done"
    assert [shop.explained(number).paused for number in (0, 1)] == [None, None]


def test_a_message_that_holds_its_partition_is_given_up_and_its_dead_letter_replayed(shop: Shop) -> None:
    start = shop.explained(0).watermark
    shop.send(b"bad", b"next")
    wait_until(lambda: shop.explained(0).state == "parked", 60)
    offset = max(0, shop.explained(0).blocking_offset or 0)
    place = {"group": shop.topic, "member": shop.owner(0), "topic": shop.topic, "partition": 0, "offset": offset}

    wrong = act(shop.address, "give-up", **{**place, "offset": offset + 1})
    status, given = act(shop.address, "give-up", **place)

    assert (status, given["outcome"]) == (200, "done")
    assert f"dlq.{shop.topic} has it, and its key goes on" in given["said"]
    assert (wrong[0], wrong[1]["outcome"]) == (409, "refused")
    assert shop.audit(wrong[1]["id"])[-1].outcome is Outcome.REFUSED
    wait_until(lambda: shop.explained(0).watermark == max(0, start) + 2, 60)

    letters = [{"topic": f"dlq.{shop.topic}", "partition": number, "offset": 0} for number in (0, 1)]
    letter = next(it for it in letters if act(shop.address, "replay", dry_run=True, **it)[0] == 200)
    would, replayed = act(shop.address, "replay", dry_run=True, **letter), act(shop.address, "replay", **letter)
    twice = act(shop.address, "replay", **letter)

    assert would[1]["said"].endswith(f"would be sent to {shop.topic}")
    assert (replayed[0], replayed[1]["said"].endswith(f"was sent to {shop.topic}")) == (200, True)
    assert (twice[0], "an earlier replay sent it" in twice[1]["said"]) == (409, True)
    wait_until(lambda: shop.explained(0).state == "parked", 60)


def test_offsets_move_only_in_a_group_without_members(shop: Shop) -> None:
    refused = act(shop.address, "offsets", group=shop.topic, to="earliest")
    group = f"{shop.topic}-others"
    shop.send(b"good", b"good", partition=1)

    would = act(shop.address, "offsets", group=group, to="1", topics=[f"{shop.topic}:1"], dry_run=True)
    status, moved = act(shop.address, "offsets", group=group, to="1", topics=[f"{shop.topic}:1"])

    assert (refused[0], "it has 2 members" in refused[1]["said"]) == (409, True)
    assert f"offsets of group {group} would be changed: {shop.topic}:1 from nothing to 1;" in would[1]["said"]
    assert status == 200
    assert moved["said"].startswith(f"the offsets of group {group} are changed: {shop.topic}:1 from nothing to 1")


def test_a_wrong_token_changes_nothing_and_is_reported_to_the_audit(shop: Shop) -> None:
    wrong = act(shop.address, "pause", token=TOKEN.upper(), group=shop.topic, topic=shop.topic)
    right = act(shop.address, "pause", dry_run=True, group=shop.topic, topic=shop.topic)

    assert (wrong[0], right[0]) == (401, 200)
    assert [shop.explained(number).paused for number in (0, 1)] == [None, None]
    refused = [record for record in shop.audit() if "a wrong token from 127.0.0.1" in record.said]
    assert [(record.kind, record.outcome) for record in refused] == [(Kind.OUTCOME, Outcome.REFUSED)]
