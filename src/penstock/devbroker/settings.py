"""The files a single-node Kafka is started with: its properties and its log format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.config import reserved

_OWNED = {
    "process.roles": "the embedded broker is one node in both roles",
    "node.id": "the embedded broker is one node, number 1",
    "controller.quorum.voters": "the embedded broker is its own quorum",
    "controller.quorum.bootstrap.servers": "the embedded broker is its own quorum",
    "controller.listener.names": "the listeners are set up from port=",
    "listeners": "choose the port with port=; the address is always 127.0.0.1",
    "advertised.listeners": "choose the port with port=; the address is always 127.0.0.1",
    "listener.security.protocol.map": "the embedded broker listens in plain text on 127.0.0.1",
    "inter.broker.listener.name": "the embedded broker has no other brokers",
    "log.dir": "choose the folder with data_dir=",
    "log.dirs": "choose the folder with data_dir=",
    "metadata.log.dir": "choose the folder with data_dir=",
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


def check_config(config: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` when `config` sets what the embedded broker holds itself."""
    reserved(config, _OWNED, "the embedded broker")


def properties(port: int, controller_port: int, storage: Path, config: Mapping[str, str]) -> str:
    """Return the text of `server.properties`.

    Args:
        port: where clients connect, on 127.0.0.1.
        controller_port: where the node talks to itself.
        storage: folder of Kafka's logs.
        config: the user's settings, which win over our defaults.
    """
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
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in {**_DEFAULTS, **config, **owned}.items())


def log_format() -> str:
    """Return the text of the log settings: warnings and errors, to standard output, with short stacks."""
    return _LOG_FORMAT


def _escaped(value: str) -> str:
    r"""Write a value for Java's `Properties.load`: Latin-1 bytes, all else as \uXXXX (UTF-16), backslashes doubled."""
    doubled = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return "".join(
        character
        if character.isascii()
        else "".join(f"\\u{unit:04x}" for unit in memoryview(character.encode("utf-16-le")).cast("H"))
        for character in doubled
    )
