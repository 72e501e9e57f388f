"""Requests to coordinators: none ends the process, and nothing waits for ever for their answers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from kafka_proxy import API_VERSIONS, KafkaProxy, What
from penstock.clients.requests import granted_rights
from penstock.clients.requests.granted_rights import AskedRights
from penstock.clients.requests.group_requests import GroupAdmin
from penstock.clients.rights import group_right
from penstock.devbroker import DevBroker
from penstock.transactions.coordinator.checks.check_sender import CheckSender, SendOutcome
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

SOURCES = Path(penstock.__file__).parent

#: What ends the process, as `tests/chaos/test_chaos_admin_requests.py` finds, and which module asks it guarded.
DEADLY = {
    "describe_consumer_groups": {"clients/requests/group_requests.py"},
    "alter_consumer_group_offsets": {"clients/requests/group_requests.py"},
    "list_consumer_group_offsets": set(),
    "delete_consumer_groups": set(),
}

#: Asks a question that is answered too late, waits until it may go on, and asks again; `ask` is defined before it.
CHILD = """
import sys
from confluent_kafka import KafkaError, KafkaException
from penstock import clients
from penstock.clients.requests.answers import answered
from penstock.clients.requests.group_requests import GroupAdmin, describe_groups

def is_answered(question, limit_s):
    try:
        answered(question, limit_s)
    except KafkaException as error:
        return error.args[0].code() != KafkaError._TIMED_OUT
    return True

members = GroupAdmin(lambda: clients.admin(sys.argv[1], {}))
late = ask(members.client)
print(is_answered(late, 1.5), flush=True)
sys.stdin.readline()
if keeps:
    is_answered(late, 60)
else:
    members.renew()
print(is_answered(describe_groups(members.client, ["asked"])["asked"], 60))
"""
PLAIN = "keeps, ask = True, lambda admin: admin.describe_consumer_groups(['asked'], request_timeout=1)['asked']\n"
GUARDED = "keeps, ask = {keeps}, lambda admin: describe_groups(admin, ['asked'])['asked']\n"


@pytest.fixture
def proxy(broker: DevBroker) -> Iterator[KafkaProxy]:
    """A proxy before the broker."""
    with KafkaProxy(broker.bootstrap_servers) as running:
        yield running


def test_no_module_sends_a_request_that_may_end_the_process_but_the_one_that_guards_it() -> None:
    found: dict[str, set[str]] = {name: set() for name in DEADLY}

    for path in SOURCES.rglob("*.py"):
        called = re.findall(r"\.(\w+)\(", path.read_text())
        for name in DEADLY.keys() & set(called):
            found[name].add(path.relative_to(SOURCES).as_posix())

    assert found == DEADLY


@pytest.mark.parametrize(
    ("program", "code"),
    [
        # Where the library is mended, this fails, and `group_requests` may go.
        pytest.param(PLAIN, -signal.SIGABRT, id="the library's own time-out"),
        pytest.param(GUARDED.format(keeps=True), 0, id="a late answer"),
        pytest.param(GUARDED.format(keeps=False), 0, id="another client"),
    ],
)
def test_a_coordinator_that_is_reached_after_the_limit_ends_no_process(
    proxy: KafkaProxy, program: str, code: int
) -> None:
    arguments = [sys.executable, "-c", program + CHILD, proxy.bootstrap_servers]
    # The second connection is the one to the coordinator.
    with proxy.fault(API_VERSIONS, What.HOLD, skip=1) as fault:
        child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            said = child.stdout.readline()
            proxy.let_go(fault)
            said += child.communicate("\n", timeout=60)[0]
        finally:
            child.kill()

    assert child.returncode == code
    assert said == ("False\nTrue\n" if code == 0 else "False\n")


class Asked:
    """An admin client that answers what it was made with, or never."""

    def __init__(self, members: int | None) -> None:
        self._members = members

    def describe_consumer_groups(self, names: list[str], **_: object) -> dict[str, Future[Any]]:
        futures: dict[str, Future[Any]] = {name: Future() for name in names}
        for future in futures.values():
            if self._members is not None:
                future.set_result(SimpleNamespace(members=[None] * self._members))
        return futures


def test_a_check_whose_group_nobody_knows_is_said_and_asked_for_by_another_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clients: Any = iter([Asked(None), Asked(0)])
    rights: Any = SimpleNamespace(granted=lambda _right: None)
    unused: Any = None
    members = GroupAdmin(lambda: next(clients))
    sender = CheckSender(members, unused, StoreTopics("p", 1), RationedLog(), unused, rights=rights)
    pending: Any = SimpleNamespace(half=SimpleNamespace(group="shop"))

    outcomes = [sender.check(unused, pending, now) for now in (0.0, 4.9, 5.1, 5.2)]

    assert outcomes == [SendOutcome.LATER, SendOutcome.LATER, SendOutcome.LATER, SendOutcome.NOBODY]
    (warning,) = caplog.records
    assert "group shop are not checked: no broker said within 5 s whether one runs" in warning.message


def test_a_right_that_nobody_tells_is_unknown_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granted_rights, "_LATE_S", 0.0)
    silent: Any = Asked(None)
    right = group_right("shop")

    asked = AskedRights(silent, [right], 0.05)

    assert asked.answer() is None
    assert wait_until(asked.answer).unknown == (right,)
    assert asked.wait().unknown == (right,)
