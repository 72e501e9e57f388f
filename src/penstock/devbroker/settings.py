"""The files that each node of an embedded Kafka is started with: its properties and its log format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

HOST = "127.0.0.1"

#: Settings that the embedded broker holds itself, with what to do instead.
OWNED_SETTINGS = {
    "process.roles": "choose how many nodes there are with nodes= and controllers=",
    "node.id": "nodes are numbered from 1",
    "controller.quorum.voters": "choose the quorum with nodes= and controllers=",
    "controller.quorum.bootstrap.servers": "choose the quorum with nodes= and controllers=",
    "controller.listener.names": "the listeners are set up from port=",
    "listeners": "choose the port with port=; the address is always 127.0.0.1",
    "advertised.listeners": "choose the port with port=; the address is always 127.0.0.1",
    "listener.security.protocol.map": "choose how clients connect with security=",
    "inter.broker.listener.name": "the listeners are set up from port=",
    "log.dir": "choose the folder with data_dir=",
    "log.dirs": "choose the folder with data_dir=",
    "metadata.log.dir": "choose the folder with data_dir=",
    "authorizer.class.name": "ask for rights with acls=True",
    "super.users": "the embedded broker has one of its own, admin_config",
}

_DEFAULTS = {
    "auto.create.topics.enable": "false",  # a missing topic is an error to be seen
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",  # the first member of a group need not wait for others
    # A killed broker can register again only when its former session is over: 9 s by default. One that stands still for
    # longer than that, on a machine that sleeps or is busy, shuts itself out and names no broker to clients, some of
    # which then never find it again (librdkafka, issue 5301).
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": "16777216",
}

#: The number of copies of each kind of topic. Where fewer brokers run, transactions and groups wait for ever.
_FACTORS = (
    "default.replication.factor",
    "offsets.topic.replication.factor",
    "transaction.state.log.replication.factor",
    "share.coordinator.state.topic.replication.factor",
)
_LEAST_IN_SYNC = ("min.insync.replicas", "transaction.state.log.min.isr", "share.coordinator.state.topic.min.isr")
_MOST_COPIES = 3

#: Several nodes on one machine have fewer threads each.
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

#: What the authorizer was asked, in a file of its own: allowed at DEBUG, denied at INFO.
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
    """The ports of 127.0.0.1 on which one node listens; None where it has no such listener."""

    #: For clients: None for a node that is only a controller.
    clients: int | None
    #: Where brokers talk to each other, and we to them, without security; where there is none, that of clients.
    inside: int | None
    #: For the quorum: None for a broker whose controllers are other nodes.
    controller: int | None


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """What all nodes of a cluster have in common."""

    #: How many of them are brokers.
    brokers: int
    #: The controllers' ports by node number.
    voters: Mapping[int, int]
    #: The user's, over the defaults.
    config: Mapping[str, str]
    #: The protocol that clients speak.
    protocol: str = "PLAINTEXT"


def properties(
    number: int, ports: Ports, storage: Path, shared: SharedSettings, security: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the text of a node's `server.properties`; the user's settings win over our defaults and `security`."""
    copies = min(shared.brokers, _MOST_COPIES)
    defaults = {
        **_DEFAULTS,
        **dict.fromkeys(_FACTORS, str(copies)),
        **dict.fromkeys(_LEAST_IN_SYNC, str(max(1, copies - 1))),
        **(_FEWER_THREADS if shared.brokers > 1 else {}),
        **security,
    }
    inside = ports.inside if ports.inside != ports.clients else None
    open_ports = {"CLIENT": ports.clients, "INTERNAL": inside, "CONTROLLER": ports.controller}
    listeners = {name: f"{name}://{HOST}:{port}" for name, port in open_ports.items() if port is not None}
    roles = {"broker": ports.clients, "controller": ports.controller}
    owned = {
        "process.roles": ",".join(role for role, port in roles.items() if port is not None),
        "node.id": str(number),
        "controller.quorum.voters": ",".join(f"{voter}@{HOST}:{port}" for voter, port in shared.voters.items()),
        "controller.listener.names": "CONTROLLER",
        "listeners": ",".join(listeners.values()),
        "listener.security.protocol.map": f"CLIENT:{shared.protocol},INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(storage),
    }
    if ports.clients is not None:
        owned["inter.broker.listener.name"] = "CLIENT" if inside is None else "INTERNAL"
        owned["advertised.listeners"] = ",".join(listeners[name] for name in listeners if name != "CONTROLLER")
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in {**defaults, **shared.config, **owned}.items())


def log_format(authorizer_log: Path | None = None) -> str:
    """Return the text of the log settings: warnings and errors, and what the authorizer was asked to that file."""
    if authorizer_log is None:
        return _LOG_FORMAT
    return _LOG_FORMAT + _AUTHORIZER_LOG_FORMAT.format(path=_escaped(str(authorizer_log)))


def _escaped(value: str) -> str:
    r"""Write a value for Java's `Properties.load`: Latin-1 bytes, all else as \uXXXX (UTF-16), backslashes doubled."""
    doubled = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return "".join(
        character
        if character.isascii()
        else "".join(f"\\u{unit:04x}" for unit in memoryview(character.encode("utf-16-le")).cast("H"))
        for character in doubled
    )
