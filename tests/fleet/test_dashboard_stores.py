"""Transactions of stores that lie where their coordinator runs: in its reports, and settled by it when told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from action_tools import OF_COMMANDS, act, served

from penstock import Coordinator, TransactionalProducer, TransactionState
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.fleet.actions import Surroundings
from penstock.fleet.commands.audit_log import audit_records
from penstock.fleet.reports.reader import ReportReader
from penstock.fleet.reports.report import Report
from penstock.fleet.reports.reporter import coordinator_reporter
from penstock.fleet_member import CommandSettings, ReportSettings
from penstock.transactions import FileStore, SqlStore
from penstock.transactions.operator.audit import read_audit
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.stores import coordinator as store_coordinator
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

#: Seconds for an effect and for an answer: more than a busy machine takes, and less than an action has.
_EFFECT_S, _ANSWER_S = 35.0, 42.0
_NONE = "018f4e9c-5c1e-7abc-8def-0123456789ab"


@dataclass
class Store:
    """A store with its coordinator, a producer that leaves all undecided, and where actions are asked for."""

    broker: DevBroker
    kind: str
    prefix: str
    topic: str
    producer: TransactionalProducer
    coordinator: Coordinator
    commands: CommandSettings
    reports: ReportSettings
    address: str
    administration: Any

    def leave_undecided(self, value: bytes) -> str:
        with self.producer.transaction(self.topic, key=b"1", value=value) as pending:
            pending.unknown()
        return pending.transaction_id

    def act(self, name: str, **parameters: object) -> tuple[int, dict[str, Any]]:
        at = {"group": self.coordinator.group, "member": self.coordinator.member}
        return act(self.address, name, **at, **parameters)

    def report(self, is_wanted: Callable[[Report], object]) -> Report:
        """Return a report of the coordinator that is as wanted."""
        with ReportReader(self.broker.bootstrap_servers, topic=self.reports.topic) as reader:

            def found() -> Sequence[Report]:
                reader.follow(1.0)
                members = [one.report for group in reader.groups() for one in group.members]
                return [one for one in members if is_wanted(one)]

            return wait_until(found, 90)[0]  # type: ignore[no-any-return] # a report

    def acts(self, transaction_id: str) -> list[str]:
        """Return what the store's own audit has of a transaction; that of a store in files is in Kafka."""
        if self.kind == "sqlite":
            return [one.act.what for one in self.administration.acts(transaction_id)]
        inspection = Inspection(self.broker.bootstrap_servers, {}, StoreTopics(self.prefix))
        return [one.act.what for one in read_audit(inspection, f"{self.prefix}.audit", transaction_id)]

    def told(self, identity: str) -> list[tuple[str, str]]:
        """Return what the audit tells of an action: kinds of records, and by whom."""
        every = audit_records(self.broker.bootstrap_servers, {}, self.commands.audit_topic, 1000)
        return [(one.kind.value, one.by) for one in every if one is not None and one.id == identity]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("file", marks=pytest.mark.thorough)])
def store(
    request: pytest.FixtureRequest,
    broker: DevBroker,
    topic_numbers: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Store]:
    number, folder = next(topic_numbers), tmp_path_factory.mktemp("store")
    prefix, topic = f"desk-{number}", f"desk-orders-{number}"
    commands = CommandSettings(f"desk-commands-{number}", f"desk-audit-{number}", OF_COMMANDS)
    reports = ReportSettings(f"desk-reports-{number}", interval=0.5)
    servers = broker.bootstrap_servers
    made: SqlStore | FileStore
    if request.param == "sqlite":
        made = SqlStore(f"sqlite:///{folder}/store.db", bootstrap_servers=servers, prefix=prefix)
    else:
        made = FileStore(folder / "files", bootstrap_servers=servers, prefix=prefix)
    for name in (topic, reports.topic):
        broker.create_topic(name)
    with ExitStack() as parts:
        parts.enter_context(pytest.MonkeyPatch.context()).setattr(store_coordinator, "_EFFECT_BUDGET_S", _EFFECT_S)
        coordinator = parts.enter_context(
            # Nobody is asked meanwhile, so that what is undecided stays so.
            Coordinator(store=made, commands=commands, transaction_timeout=600.0)
        )
        producer = parts.enter_context(
            TransactionalProducer("shop", store=made, check=lambda _: TransactionState.UNKNOWN)
        )
        reporter = coordinator_reporter(coordinator.group, coordinator, servers, {}, reports)
        parts.callback(reporter.stop)
        reporter.start()
        assert coordinator._listener is not None
        assert coordinator._listener.is_listening.wait(60)
        address = parts.enter_context(served(Surroundings(servers, {}, commands, answer_s=_ANSWER_S)))
        shown = (producer, coordinator, commands, reports, address, made.administration())
        yield Store(broker, request.param, prefix, topic, *shown)


@pytest.mark.thorough
def test_a_report_names_pending_transactions_and_by_whom_they_are_settled_over_http_and_both_audits_tell(
    store: Store,
) -> None:
    ids = [store.leave_undecided(b"1"), store.leave_undecided(b"2")]
    named, before = store.coordinator, store.coordinator.statistics()

    report = store.report(lambda one: len(one.transactions) == 2)
    would = store.act("settle", transaction_id=ids[0], decision="commit", dry_run=True)
    answers = [
        store.act("settle", transaction_id=pending, decision=decision)
        for pending, decision in zip(ids, ("commit", "rollback"), strict=True)
    ]
    again = store.act("settle", transaction_id=ids[1], decision="commit")
    others = [
        store.act("settle", transaction_id=_NONE, decision="commit"),
        store.act("resume-transaction", transaction_id=ids[1]),
    ]

    assert [one["id"] for one in report.transactions] == ids
    for told in report.transactions:
        assert (told["prefix"], told["group"], told["topics"]) == (store.prefix, "shop", store.topic)
    assert report.operator == {"store": "other", "group": named.group, "member": named.member}
    assert (report.group, report.member) == (named.group, named.member)
    assert would[1]["said"].startswith(f"transaction {ids[0]} (commit) would be decided by ")
    by = "127.0.0.1 by the dashboard"
    for pending, decision, (status, settled) in zip(ids, ("commit", "rollback"), answers, strict=True):
        assert (status, settled["outcome"]) == (200, "done"), settled
        assert store.administration.show(pending) is None
        assert store.told(settled["id"]) == [("asked", by), ("answer", named.member), ("outcome", by)]
        assert store.acts(pending)[0] == decision  # then come the refused ones
    for status, told in (again, *others):
        assert (status, told["outcome"]) == (409, "refused")

    def counted() -> bool:
        after = store.coordinator.statistics()
        return (after.committed, after.rolled_back) == (before.committed + 1, before.rolled_back + 1)

    wait_until(counted)


def test_a_transaction_is_discarded_and_brought_back_by_http(store: Store) -> None:
    pending = store.leave_undecided(b"left alone")
    assert store.act("settle", transaction_id=pending, decision="discard")[1]["outcome"] == "done"

    would = store.act("resume-transaction", transaction_id=pending, dry_run=True)
    status, resumed = store.act("resume-transaction", transaction_id=pending)

    assert "would be brought back by" in would[1]["said"]
    assert (status, resumed["outcome"]) == (200, "done"), resumed
    assert "undecided; its group is asked again" in resumed["said"]
    assert store.administration.show(pending).decided is None
    assert store.acts(pending) == ["discard", "resume"]
    assert store.act("settle", transaction_id=pending, decision="commit")[1]["outcome"] == "done"


def test_what_is_for_members_is_refused_by_a_coordinator_and_one_coordinator_must_be_named(store: Store) -> None:
    stacks = store.act("stacks")
    unnamed = act(store.address, "settle", group="shop", transaction_id=_NONE, decision="commit")
    unread = store.act("settle", transaction_id="1 or 2", decision="commit")

    assert (stacks[0], stacks[1]["outcome"]) == (409, "refused")
    assert "is for a member with handlers" in stacks[1]["said"]
    assert (unnamed[0], "member must be" in unnamed[1]["said"]) == (422, True)
    assert (unread[0], "transaction_id must be" in unread[1]["said"]) == (422, True)


def test_a_coordinator_of_a_store_in_kafka_settles_by_command_too(broker: DevBroker, new_topic: Any) -> None:
    topic = new_topic()
    servers, commands = broker.bootstrap_servers, CommandSettings(f"{topic}-commands", f"{topic}-audit")
    with ExitStack() as parts:
        parts.enter_context(pytest.MonkeyPatch.context()).setattr(store_coordinator, "_EFFECT_BUDGET_S", _EFFECT_S)
        kafka: dict[str, Any] = {"bootstrap_servers": servers, "prefix": topic}
        coordinator = parts.enter_context(Coordinator(**kafka, commands=commands, transaction_timeout=600.0))
        producer = parts.enter_context(TransactionalProducer("shop", **kafka))
        address = parts.enter_context(served(Surroundings(servers, {}, commands, answer_s=_ANSWER_S)))
        assert coordinator._listener is not None
        assert coordinator._listener.is_listening.wait(60)
        with producer.transaction(topic, value=b"paid?") as pending:
            pending.unknown()
        named = {"group": f"{topic}.coordinator", "member": coordinator.member}

        status, settled = act(address, "settle", **named, transaction_id=pending.transaction_id, decision="commit")

        assert (status, settled["outcome"]) == (200, "done"), settled
        assert coordinator.statistics().committed == 1


def test_a_coordinator_hears_commands_only_where_it_was_asked_to() -> None:
    assert not Coordinator(bootstrap_servers="b:1").hears_commands
    with pytest.raises(ConfigurationError, match="commands must be True, False or"):
        Coordinator(bootstrap_servers="b:1", commands="yes")  # type: ignore[arg-type] # wrong on purpose
