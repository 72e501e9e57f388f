"""Which requests of the client library end the process, and that none does that penstock sends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import admin_requests
from chaos.admin_requests import GUARDED, PARTITIONS, PROCESSES, REQUESTS, TOPIC, try_requests
from kafka_proxy import API_VERSIONS, KafkaProxy, What
from penstock.devbroker import DevBroker

pytestmark = pytest.mark.chaos

#: Those to the coordinator of a group. `tests/clients/test_clients_group_requests.py` says who may send them.
DEADLY = {
    "describe_consumer_groups",
    "alter_consumer_group_offsets",
    "list_consumer_group_offsets",
    "delete_consumer_groups",
}
SENT = [
    *GUARDED,
    "list_topics",
    "describe_topics",
    "list_offsets",
    "describe_configs",
    "delete_records",
    "create_topics",
    "Consumer.committed",
    "Consumer.consume",
    "Producer of transactions",
]


def exit_code_of_late(request: str, broker: DevBroker) -> int:
    """Return how a process ends that asks, and reaches the node only when the time of its request is over."""
    with KafkaProxy(broker.bootstrap_servers) as proxy, proxy.fault(API_VERSIONS, What.HOLD, skip=1) as fault:
        command = [sys.executable, admin_requests.__file__, "--late", proxy.bootstrap_servers, request]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "asked\n"
            proxy.let_go(fault)
            child.communicate("\n", timeout=60)
        finally:
            child.kill()
    return child.returncode


def test_a_node_that_is_reached_too_late_ends_those_that_ask_coordinators(patient_broker: DevBroker) -> None:
    patient_broker.create_topic(TOPIC, PARTITIONS)

    codes = {request: exit_code_of_late(request, patient_broker) for request in REQUESTS}

    assert {request for request, code in codes.items() if code == -signal.SIGABRT} == DEADLY
    assert {request for request, code in codes.items() if code == 0} == REQUESTS.keys() - DEADLY


@pytest.mark.timeout(1800)
def test_no_request_that_penstock_sends_ends_the_process_when_nodes_go(tmp_path: Path) -> None:
    with DevBroker(nodes=3, start_timeout=150) as broker:
        broker.create_topic(TOPIC, PARTITIONS)
        batches = [SENT[first : first + PROCESSES] for first in range(0, len(SENT), PROCESSES)]
        found = [one for batch in batches for one in try_requests(broker, batch, 1, 5.0, tmp_path)]

    assert [(one.request, one.exit_code, one.last_line) for one in found if one.exit_code] == []
