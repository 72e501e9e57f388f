"""Requests to coordinators of groups end no process, as `benchmarks/admin_requests.py` finds of the `DEADLY` ones."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException

import penstock
from kafka_proxy import API_VERSIONS, KafkaProxy, What
from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.operator.administration import NO_ANSWER, NO_PRODUCER
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.checks import Liveness
from penstock.transactions.wire.topics import StoreTopics

DEADLY = r"\.(?:describe_consumer_groups|(?:alter|list)_consumer_group_offsets|delete_consumer_groups)\("

#: Asks a question that is answered too late, waits until it may go on, and asks again; `ask` is defined before it.
CHILD = """
import sys
from concurrent.futures import wait
from penstock import clients
from penstock.clients.answers import answered
from penstock.clients.groups import describe_groups
address, group = sys.argv[1:]
members = clients.admin(address, {})
late = ask(members)[group]
wait([late], patience)
print("answered" if late.done() and not late.exception() else "late", flush=True)
sys.stdin.readline()
if renews:
    members = clients.admin(address, {})
else:
    wait([late], 60)
answered(describe_groups(members, [group])[group], 60)"""
PLAIN = "renews, patience, ask = False, 60, lambda admin: admin.describe_consumer_groups([group], request_timeout=1)\n"
GUARDED = "renews, patience, ask = {}, 1.5, lambda admin: describe_groups(admin, [group])\n"


def test_only_the_module_that_guards_them_sends_requests_that_may_end_the_process() -> None:
    found = {path.name for path in Path(penstock.__file__).parent.rglob("*.py") if re.search(DEADLY, path.read_text())}

    assert found == {"groups.py"}


# Where the library is fixed, the first case fails, and this part of `clients.groups` may go.
@pytest.mark.parametrize(
    ("program", "code"),
    [(PLAIN, -signal.SIGABRT), (GUARDED.format("False"), 0), (GUARDED.format("True"), 0)],
    ids=["the library's time-out", "a late answer", "another client"],
)
def test_a_coordinator_reached_too_late_ends_no_process(broker: Any, new_name: Any, program: str, code: int) -> None:
    # The second connection is the one to the coordinator.
    with KafkaProxy(broker.bootstrap_servers) as proxy, proxy.fault(API_VERSIONS, What.HOLD, skip=1) as fault:
        command = [sys.executable, "-c", program + CHILD, proxy.bootstrap_servers, new_name("asked")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "late\n"
            proxy.let_go(fault)
            child.communicate("\n", timeout=60)

    assert child.returncode == code


@pytest.mark.parametrize("said", [None, KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)])
def test_a_check_with_an_unknown_group_is_logged_and_asks_again(
    said: KafkaError | None, caplog: pytest.LogCaptureFixture
) -> None:
    topics, silent, knowing = StoreTopics("p", 1), Future[Any](), Future[Any]()
    knowing.set_result(Mock(members=[]))
    if said is not None:
        silent.set_exception(KafkaException(said))
    answers = [{topics.checkers("shop"): future} for future in (silent, knowing)]
    admins = [Mock(**{"describe_consumer_groups.return_value": answer}) for answer in answers]
    context = CoordinatorContext("", {}, CheckPolicy(6, 30, 15), topics)
    liveness = Liveness(context, Mock(side_effect=admins))

    waits = [liveness.hindrance("shop", now) for now in (0.0, 2.0, 4.9, 5.1, 5.2)]

    assert waits == ["", "", "", NO_ANSWER.format("shop"), NO_PRODUCER.format("shop")]
    assert "group shop are not checked: no broker said within 5 s whether one runs" in caplog.text
    assert said is None or "COORDINATOR_LOAD_IN_PROGRESS" in caplog.text
