"""The settings files of a node of an embedded Kafka: its properties and its log format."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import DevBrokerError

HOST = "127.0.0.1"

#: Ports to choose from. They are below Linux's ephemeral ports, so that no connection takes the port while a broker
#: restarts.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000

#: Settings that the embedded broker sets itself, with the alternative for users.
OWNED_SETTINGS = {
    "process.roles": "choose how many nodes there are with nodes=",
    "node.id": "nodes are numbered from 1",
    "controller.quorum.voters": "choose the quorum with nodes=",
    "controller.quorum.bootstrap.servers": "choose the quorum with nodes=",
    "controller.listener.names": "the listeners are set up from port=",
    "listeners": "choose the port with port=; the address is always 127.0.0.1",
    "advertised.listeners": "choose the port with port=; the address is always 127.0.0.1",
    "listener.security.protocol.map": "choose how clients connect with security=",
    "inter.broker.listener.name": "the listeners are set up from port=",
    "log.dir": "choose the folder with data_dir=",
    "log.dirs": "choose the folder with data_dir=",
    "metadata.log.dir": "choose the folder with data_dir=",
    "authorizer.class.name": "switch permissions on with acls=True",
    "super.users": "the embedded broker has its own administrator, admin_config",
}

_DEFAULTS = {
    "auto.create.topics.enable": "false",  # a missing topic must be a visible error
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",  # the first member of a group need not wait for others
    # A killed broker can register again only when its former session is over, by default after 9 s. A broker that is
    # stopped for longer, on a sleeping or busy machine, fences itself and gives clients an empty list of brokers. Some
    # clients then never find it again (librdkafka, issue 5301).
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": "16777216",
}

#: The number of copies, by kind of topic. If fewer brokers run, transactions and groups wait for ever.
_FACTORS = (
    "default.replication.factor",
    "offsets.topic.replication.factor",
    "transaction.state.log.replication.factor",
    "share.coordinator.state.topic.replication.factor",
)
_LEAST_IN_SYNC = ("min.insync.replicas", "transaction.state.log.min.isr", "share.coordinator.state.topic.min.isr")
_MOST_COPIES = 3

#: Settings of nodes in a cluster: they share one machine, so each has fewer threads.
_FEWER_THREADS = {"num.network.threads": "2", "num.io.threads": "4"}

_LOG_FORMAT = """\
rootLogger.level = WARN
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %m (%c{1})%n%ex{12}
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = INFO
"""

#: The log of the permissions that the authorizer checks, in a file of its own: allowed at DEBUG, denied at INFO.
_AUTHORIZER_LOG_FORMAT = """\
appender.asked.type = File
appender.asked.name = asked
appender.asked.fileName = {path}
appender.asked.layout.type = PatternLayout
appender.asked.layout.pattern = %m%n
logger.authorizer.name = kafka.authorizer.logger
logger.authorizer.level = DEBUG
logger.authorizer.additivity = false
logger.authorizer.appenderRef.asked.ref = asked
"""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one node on 127.0.0.1."""

    clients: int
    #: For brokers and this process, without security; the port for clients if the broker has no security.
    inside: int
    #: For the quorum.
    controller: int


def choose_ports(first: int | None, nodes: int, *, secured: bool) -> dict[int, Ports]:
    """Return the ports of each node by its number. Ports for clients count up from `first`, the others are any free."""
    wanted = [] if first is None else list(range(first, first + nodes))
    for port in wanted:
        if not _is_free(port):
            raise DevBrokerError(
                f"port {port} on {HOST} is taken by another program; stop that program or choose another port"
            )
    taken = set(wanted)
    ports: dict[int, Ports] = {}
    for index in range(nodes):
        port = wanted[index] if wanted else _free_port(taken)
        ports[index + 1] = Ports(port, _free_port(taken) if secured else port, _free_port(taken))
    return ports


def _free_port(taken: set[int]) -> int:
    """Return a free port that is not in `taken`, and add it there."""
    for _ in range(200):
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        if port not in taken and _is_free(port):
            taken.add(port)
            return port
    raise DevBrokerError(f"no free port found on {HOST} between {_FIRST_PORT} and {_LAST_PORT}; name one with port=")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As Java does: connections of an earlier broker that still time out do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def properties(
    number: int,
    ports: Mapping[int, Ports],
    storage: Path,
    protocol: str,
    config: Mapping[str, str],
) -> str:
    """Return the text of a node's `server.properties`.

    Args:
        number: number of the node.
        ports: ports of all nodes, by number.
        storage: the folder with its topics.
        protocol: security protocol of the clients' listener, such as `PLAINTEXT`.
        config: settings of that listener and of the user, which override the defaults.
    """
    own, copies = ports[number], min(len(ports), _MOST_COPIES)
    defaults = {
        **_DEFAULTS,
        **dict.fromkeys(_FACTORS, str(copies)),
        **dict.fromkeys(_LEAST_IN_SYNC, str(max(1, copies - 1))),
        **(_FEWER_THREADS if len(ports) > 1 else {}),
    }
    listeners = {"CLIENT": own.clients, "INTERNAL": own.inside}
    if own.inside == own.clients:
        del listeners["INTERNAL"]
    advertised = ",".join(f"{name}://{HOST}:{port}" for name, port in listeners.items())
    owned = {
        "process.roles": "broker,controller",
        "node.id": str(number),
        "controller.quorum.voters": ",".join(f"{voter}@{HOST}:{node.controller}" for voter, node in ports.items()),
        "controller.listener.names": "CONTROLLER",
        "listeners": f"{advertised},CONTROLLER://{HOST}:{own.controller}",
        "advertised.listeners": advertised,
        "inter.broker.listener.name": list(listeners)[-1],
        "listener.security.protocol.map": f"CLIENT:{protocol},INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(storage),
    }
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in {**defaults, **config, **owned}.items())


def log_format(authorizer_log: Path | None) -> str:
    """Return the log settings: warnings and errors, and checks of permissions to `authorizer_log`."""
    if authorizer_log is None:
        return _LOG_FORMAT
    return _LOG_FORMAT + _AUTHORIZER_LOG_FORMAT.format(path=_escaped(str(authorizer_log)))


def _escaped(value: str) -> str:
    r"""Write a value for Java's `Properties.load`, which reads \uXXXX and backslashes as JSON does."""
    return json.dumps(value)[1:-1]
