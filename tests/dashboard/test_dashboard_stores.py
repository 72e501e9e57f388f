"""Transactions of stores that lie where their coordinator runs: in its reports, and settled by it when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from action_tools import OF_COMMANDS, TOKEN, act, served

from penstock import Coordinator, TransactionalProducer, TransactionState
from penstock.commands.audit_log import audit_records
from penstock.commands.settings import CommandSettings
from penstock.dashboard.actions import ActionSettings
from penstock.description import coordinator_reporter
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.reports.reader import ReportReader
from penstock.reports.report import Report
from penstock.reports.settings import ReportSettings
from penstock.transactions import FileStore, SqlStore
from penstock.transactions.stores import commanding
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
        with wait_until(self._reader, 60) as reader:

            def found() -> Sequence[Report]:
                reader.follow(1.0)
                members = [one.report for group in reader.groups() for one in group.members]
                return [one for one in members if is_wanted(one)]

            return wait_until(found, 90)[0]  # type: ignore[no-any-return] # a report

    def _reader(self) -> ReportReader | None:
        """Return what reads the reports; None while there is no topic of them."""
        reader = ReportReader(self.broker.bootstrap_servers, topic=self.reports.topic)
        try:
            reader.__enter__()
        except TopicNotFoundError:
            return None
        reader.__exit__()
        return ReportReader(self.broker.bootstrap_servers, topic=self.reports.topic)

    def told(self, identity: str) -> list[tuple[str, str]]:
        """Return what the audit tells of an action: kinds of records, and by whom."""
        every = audit_records(self.broker.bootstrap_servers, {}, self.commands.audit_topic, 1000)
        return [(one.kind.value, one.by) for one in every if one is not None and one.id == identity]


@pytest.fixture(scope="module", params=["sqlite", "file"])
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
    broker.create_topic(topic)
    with ExitStack() as parts:
        parts.enter_context(pytest.MonkeyPatch.context()).setattr(commanding, "_EFFECT_S", _EFFECT_S)
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
        address = parts.enter_context(served(ActionSettings(servers, {}, TOKEN, commands, answer_timeout=_ANSWER_S)))
        shown = (producer, coordinator, commands, reports, address, made.administration())
        yield Store(broker, request.param, prefix, topic, *shown)


def test_a_report_names_the_oldest_pending_transactions_and_who_settles_them(store: Store) -> None:
    first, second = store.leave_undecided(b"1"), store.leave_undecided(b"2")

    report = store.report(lambda one: len(one.transactions) == 2)

    assert [one["id"] for one in report.transactions] == [first, second]
    for one in report.transactions:
        assert (one["prefix"], one["group"], one["topics"]) == (store.prefix, "shop", store.topic)
        assert one["age"] >= 0
    named = store.coordinator
    assert report.operator == {"store": "other", "group": named.group, "member": named.member}
    assert (report.group, report.member) == (named.group, named.member)
    for one in (first, second):
        store.act("settle", transaction_id=one, decision="rollback")


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_a_transaction_is_settled_by_http_and_stands_in_both_audits(store: Store, decision: str) -> None:
    pending = store.leave_undecided(b"paid?")
    before = store.coordinator.statistics()

    would = store.act("settle", transaction_id=pending, decision=decision, dry_run=True)
    status, settled = store.act("settle", transaction_id=pending, decision=decision)

    assert would[1]["said"].startswith(f"transaction {pending} ({decision}) would be decided by ")
    assert (status, settled["outcome"]) == (200, "done"), settled
    assert store.administration.show(pending) is None
    after = store.coordinator.statistics()
    name = "committed" if decision == "commit" else "rolled_back"
    wait_until(lambda: getattr(store.coordinator.statistics(), name) == getattr(before, name) + 1, 60)
    assert after.pending == before.pending - 1
    named = store.coordinator
    by = "127.0.0.1 by the dashboard"
    assert store.told(settled["id"]) == [("asked", by), ("answer", named.member), ("outcome", by)]
    acts = _acts(store, pending)
    assert [(one.what, one.who.startswith(by)) for one in acts] == [(decision, True)]


def test_a_second_decision_and_one_about_nothing_are_refused(store: Store) -> None:
    pending = store.leave_undecided(b"once")
    assert store.act("settle", transaction_id=pending, decision="rollback")[1]["outcome"] == "done"

    status, again = store.act("settle", transaction_id=pending, decision="commit")
    missing = store.act("settle", transaction_id=_NONE, decision="commit")
    resumed = store.act("resume-transaction", transaction_id=pending)

    assert (status, again["outcome"]) == (409, "refused")
    assert (missing[0], missing[1]["outcome"]) == (409, "refused")
    assert (resumed[0], resumed[1]["outcome"]) == (409, "refused")


def test_a_transaction_is_discarded_and_brought_back_by_http(store: Store) -> None:
    pending = store.leave_undecided(b"left alone")
    assert store.act("settle", transaction_id=pending, decision="discard")[1]["outcome"] == "done"

    would = store.act("resume-transaction", transaction_id=pending, dry_run=True)
    status, resumed = store.act("resume-transaction", transaction_id=pending)

    assert "would be brought back by" in would[1]["said"]
    assert (status, resumed["outcome"]) == (200, "done"), resumed
    assert "undecided; its group is asked again" in resumed["said"]
    assert store.administration.show(pending).decided is None
    assert [one.what for one in _acts(store, pending)] == ["discard", "resume"]
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
        parts.enter_context(pytest.MonkeyPatch.context()).setattr(commanding, "_EFFECT_S", _EFFECT_S)
        kafka: dict[str, Any] = {"bootstrap_servers": servers, "prefix": topic}
        coordinator = parts.enter_context(Coordinator(**kafka, commands=commands, transaction_timeout=600.0))
        producer = parts.enter_context(TransactionalProducer("shop", **kafka))
        address = parts.enter_context(served(ActionSettings(servers, {}, TOKEN, commands, answer_timeout=_ANSWER_S)))
        assert coordinator._listener is not None
        assert coordinator._listener.is_listening.wait(60)
        with producer.transaction(topic, value=b"paid?") as pending:
            pending.unknown()
        named = {"group": f"{topic}.coordinator", "member": coordinator.member}

        status, settled = act(address, "settle", **named, transaction_id=pending.transaction_id, decision="commit")

        assert (status, settled["outcome"]) == (200, "done"), settled
        assert coordinator.statistics().committed == 1


def test_a_coordinator_that_was_not_told_to_hears_nothing(store: Store) -> None:
    with Coordinator(bootstrap_servers=store.broker.bootstrap_servers, prefix=f"{store.prefix}.quiet") as quiet:
        assert not quiet.hears_commands
        assert not any(one.name.startswith("penstock-commands-" + quiet.prefix) for one in threading.enumerate())
    with pytest.raises(ConfigurationError, match="commands must be True, False or"):
        Coordinator(bootstrap_servers="b:1", commands="yes")  # type: ignore[arg-type] # wrong on purpose


def _acts(store: Store, transaction_id: str) -> list[Any]:
    """Return what the store's own audit tells of a transaction."""
    if store.kind == "sqlite":
        return [one.act for one in store.administration.acts(transaction_id)]
    from penstock.transactions.operator.audit import read_audit
    from penstock.transactions.operator.inspection import Inspection
    from penstock.transactions.wire.topics import StoreTopics

    topics = StoreTopics(store.prefix)
    inspection = Inspection(store.broker.bootstrap_servers, {}, topics)
    return [one.act for one in read_audit(inspection, topics.audit, transaction_id)]
