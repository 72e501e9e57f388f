"""Transactions of each kind of store: in their coordinator's reports, and settled over HTTP, by it or the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from action_tools import OF_COMMANDS, act, served

from penstock import Coordinator, TransactionalProducer, TransactionState
from penstock.devbroker import DevBroker
from penstock.fleet.actions.dispatch import ActionContext
from penstock.fleet.commands.audit import audit_records
from penstock.fleet.reports.reader import ReportReader
from penstock.fleet.reports.report import Report
from penstock.fleet.reports.reporter import coordinator_reporter
from penstock.fleet_member import CommandSettings, Outcome, ReportSettings
from penstock.transactions import FileStore, SqlStore
from penstock.transactions.stores import coordinator as store_coordinator
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from waiting import wait_until

#: Seconds for an effect and for an answer: more than a busy machine takes, and less than an action has.
_EFFECT_S, _ANSWER_S = 35.0, 42.0
_NONE = "018f4e9c-5c1e-7abc-8def-0123456789ab"


@dataclass
class Store:
    """A store with its coordinator, a producer that leaves all undecided, and where actions are asked for."""

    servers: str
    kind: str
    topic: str
    producer: TransactionalProducer
    coordinator: Coordinator
    address: str
    administration: Any

    def leave_undecided(self) -> str:
        with self.producer.transaction(self.topic, key=b"1", value=b"left alone") as pending:
            pending.unknown()
        return pending.transaction_id

    def act(self, name: str, transaction_id: str, **parameters: object) -> tuple[int, dict[str, Any]]:
        whom = {"group": self.coordinator.group, "member": self.coordinator.member}
        if self.kind == "kafka":
            whom = {"prefix": self.coordinator.prefix}
        return act(self.address, name, transaction_id=transaction_id, **whom, **parameters)

    def report(self, transactions: int) -> Report:
        """Return a report of the coordinator with so many transactions."""
        with ReportReader(self.servers, topic=f"reports.{self.topic}") as reader:

            def found() -> list[Report]:
                reader.follow(1.0)
                reports = [member.report for group in reader.groups() for member in group.members]
                return [report for report in reports if len(report.transactions) == transactions]

            return wait_until(found, 90)[0]  # type: ignore[no-any-return] # a report

    def acts(self, transaction_id: str) -> list[tuple[str, str]]:
        """Return the actions on a transaction, with actor and reason."""
        acts = self.administration.acts(transaction_id)
        return [(act.what, ": ".join(filter(None, (act.who, act.why)))) for act in acts]

    def audited(self, identity: str) -> list[tuple[str, str, Outcome | None]]:
        """Return the audit of an action: kinds of records, actors, and results."""
        every = audit_records(self.servers, {}, f"audit.{self.topic}", 1000)
        return [(each.kind.value, each.by, each.outcome) for each in every if each is not None and each.id == identity]


@pytest.fixture(
    params=[
        "sqlite",
        "kafka by its coordinator",
        pytest.param("file", marks=pytest.mark.thorough),
        pytest.param("kafka", marks=pytest.mark.thorough),
    ]
)
def store(
    request: pytest.FixtureRequest, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> Iterator[Store]:
    topic, servers = new_topic(), broker.bootstrap_servers
    prefix = f"store.{topic}"
    broker.create_topic(f"reports.{topic}")
    commands = CommandSettings(f"commands.{topic}", f"audit.{topic}", OF_COMMANDS)
    reports = ReportSettings(f"reports.{topic}", interval=0.5)
    where: dict[str, Any] = {"bootstrap_servers": servers, "prefix": prefix}
    if request.param == "sqlite":
        where = {"store": SqlStore(f"sqlite:///{tmp_path}/store.db", **where)}
    elif request.param == "file":
        where = {"store": FileStore(tmp_path / "files", **where)}
    with ExitStack() as parts:
        parts.enter_context(pytest.MonkeyPatch.context()).setattr(store_coordinator, "_EFFECT_BUDGET_S", _EFFECT_S)
        # No check is sent meanwhile, so undecided transactions stay undecided.
        coordinator = parts.enter_context(Coordinator(**where, commands=commands, transaction_timeout=600.0))
        producer = parts.enter_context(TransactionalProducer("shop", **where, check=lambda _: TransactionState.UNKNOWN))
        reporter = coordinator_reporter(coordinator, servers, {}, reports)
        parts.callback(reporter.stop)
        reporter.start()
        assert coordinator._listener is not None
        assert coordinator._listener.is_listening.wait(60)
        address = parts.enter_context(served(ActionContext(servers, {}, commands, answer_s=_ANSWER_S)))
        if "store" in where:
            administration = where["store"].administration()
        else:
            administration = parts.enter_context(KafkaAdministration(servers, prefix, {}))
        yield Store(servers, request.param, topic, producer, coordinator, address, administration)


def test_transactions_are_reported_settled_discarded_and_brought_back_over_http_and_both_audits_tell(
    store: Store,
) -> None:
    named, by = store.coordinator, "127.0.0.1 by the dashboard"
    ids = [store.leave_undecided() for _ in range(3)]
    first, second, third = ids

    report = store.report(3)
    would = store.act("settle", first, decision="commit", dry_run=True)[1]["said"]
    assert named.statistics().committed == 0
    committed = store.act("settle", first, decision="commit")
    rolled_back = store.act("settle", second, decision="rollback")
    discarded = store.act("settle", third, decision="discard")
    would_resume = store.act("resume-transaction", third, dry_run=True)[1]["said"]
    resumed = store.act("resume-transaction", third)
    still = store.administration.show(third)
    refused = [
        store.act("settle", second, decision="commit"),
        store.act("settle", _NONE, decision="commit"),
        store.act("resume-transaction", second),
    ]
    ended = store.act("settle", third, decision="rollback")

    assert (report.group, report.member, report.commands) == (named.group, named.member, True)
    kind = "kafka" if named.is_in_kafka else "other"
    assert report.operator == {"store": kind, "group": named.group, "member": named.member}
    assert sorted(pending["id"] for pending in report.transactions) == sorted(ids)
    for pending in report.transactions:
        assert (pending["prefix"], pending["group"], pending["topics"]) == (named.prefix, "shop", store.topic)
    is_asked = store.kind != "kafka"
    doer = f"{named.member} of {named.group}" if is_asked else "this dashboard"
    assert would == f"transaction {first} (commit) would be decided by {doer}, in its store"
    assert would_resume.startswith(f"transaction {third} would be brought back by {doer}, undecided")
    answers = [("answer", named.member, Outcome.DONE)] if is_asked else []
    for (status, settled), end in (
        (committed, f"{first}: committed: visible"),
        (rolled_back, f"{second}: rolled back"),
        (discarded, f"{third}: moved to the discarded topic"),
        (resumed, f"{third} was brought back, undecided; its group is asked again"),
        (ended, f"{third}: rolled back"),
    ):
        assert (status, settled["outcome"]) == (200, "done"), settled
        assert settled["said"].endswith(f"transaction {end}")
        assert store.audited(settled["id"]) == [("asked", by, None), *answers, ("outcome", by, Outcome.DONE)]
    assert still.decided is None
    assert [(status, answer["outcome"]) for status, answer in refused] == [(409, "refused")] * 3
    assert store.acts(first) == [("commit", f"{by}: {committed[1]['id']}")]
    assert store.acts(second)[0][0] == "rollback"  # then come the refused ones
    assert [what for what, _ in store.acts(third)] == ["discard", "resume", "rollback"]
    assert store.acts(third)[1][1] == f"{by}: {resumed[1]['id']}"
    assert [store.administration.show(transaction_id) for transaction_id in ids] == [None] * 3
    wait_until(lambda: (named.statistics().committed, named.statistics().rolled_back) == (1, 2))
