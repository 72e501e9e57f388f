"""The files a single-node Kafka is started with: its properties and its log format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Settings that the embedded broker holds itself, with what to do in place of them.
OWNED_SETTINGS = {
    "process.roles": "the embedded broker is one node in both roles",
    "node.id": "the embedded broker is one node, number 1",
    "controller.quorum.voters": "the embedded broker is its own quorum",
    "controller.quorum.bootstrap.servers": "the embedded broker is its own quorum",
    "controller.listener.names": "the listeners are set up from port=",
    "listeners": "choose the port with port=; the address is always 127.0.0.1",
    "advertised.listeners": "choose the port with port=; the address is always 127.0.0.1",
    "listener.security.protocol.map": "choose how clients connect with security=",
    "inter.broker.listener.name": "the embedded broker has no other brokers",
    "log.dir": "choose the folder with data_dir=",
    "log.dirs": "choose the folder with data_dir=",
    "metadata.log.dir": "choose the folder with data_dir=",
    "authorizer.class.name": "ask for rights with acls=True",
    "super.users": "the embedded broker has one of its own, admin_config",
}

#: What one node needs: without the factors of 1, transactions and groups wait for ever for other brokers.
_DEFAULTS = {
    "auto.create.topics.enable": "false",  # a missing topic is an error to be seen
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "group.initial.rebalance.delay.ms": "0",  # the first member of a group need not wait for others
    # A killed broker can register anew only when its former session is over: 9 s by default. One that stands still for
    # longer than that, on a machine that sleeps or is busy, shuts itself out and names no broker to clients, some of
    # which then never find it again (librdkafka, issue 5301).
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": "16777216",
}

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
class SecuredListener:
    """What a broker with security has beside that."""

    protocol: str
    #: Where the broker talks to itself, and we to it, without security.
    inside_port: int
    #: The broker's settings for it; a user's settings win over them.
    settings: Mapping[str, str]


def properties(
    port: int, controller_port: int, storage: Path, config: Mapping[str, str], secured: SecuredListener | None = None
) -> str:
    """Return the text of `server.properties`; the settings in `config` win over our defaults."""
    owned = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": str(storage),
    }
    defaults = _DEFAULTS
    if secured is not None:
        defaults = {**defaults, **secured.settings}
        inside = f"INTERNAL://127.0.0.1:{secured.inside_port}"
        owned |= {
            "inter.broker.listener.name": "INTERNAL",
            "listeners": f"CLIENT://127.0.0.1:{port},{inside},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"CLIENT://127.0.0.1:{port},{inside}",
            "listener.security.protocol.map": f"CLIENT:{secured.protocol},INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        }
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in {**defaults, **config, **owned}.items())


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
