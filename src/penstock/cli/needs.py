"""The needs of an app, its sinks and its coordinator: topics and the least permissions. Sends no request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.clients.rights import Operation, Right, group_right, topic_right
from penstock.spark_sink.queries.sink_specs import group_of_sinks

if TYPE_CHECKING:
    from penstock.app import App

#: The use of topics of a transaction store.
TRANSACTIONS = "transactions"


@dataclass(frozen=True, slots=True)
class AppNeeds:
    """The needs of an app."""

    #: Topics that must exist, with their use.
    topics: dict[str, str]
    #: Topics that the app creates at its start if they are absent, with their use.
    made: dict[str, str]
    #: The topics in `made` for dead letters and retries, with the topics of their messages.
    outputs: Mapping[str, Sequence[str]]
    rights: tuple[Right, ...]
    #: Needs that the app's definition does not show.
    notes: tuple[str, ...]


def needs_of_app(app: App, existing: Collection[str]) -> AppNeeds:
    """Return the needs of an app on a cluster with the topics `existing`. Raises as `LitePushConsumer.needs`."""
    topics, made, rights, notes = dict[str, str](), dict[str, str](), list[Right](), list[str]()
    outputs: Mapping[str, Sequence[str]] = {}
    if app.consumes:
        needs = app.consumer().needs(existing)
        topics |= dict.fromkeys(needs.results, "results") | dict.fromkeys(needs.consumed, "read")
        outputs = needs.outputs
        made |= {name: "retries" if name in needs.retries else "dead letters" for name in outputs}
        rights += needs.rights
        if app.patterns:
            notes.append("patterns: the list lacks permissions on topics that match them later")
        notes.append("a handler that returns an Outgoing needs Write on its topic too")
    rights += [group_right(group_of_sinks(app.name))] if app.sinks else []
    for spec in app.sinks:
        topics |= dict.fromkeys(spec.topics, f"read by the sink {spec.name}")
        rights += [topic_right(Operation.READ, name) for name in spec.topics]
        rights += _of_sink(spec.name, spec.function, spec.topics, app, notes)
    rights += _of_coordinator(app, existing, made, notes)
    if app.report is not None:
        made[app.report.topic] = "reports"
        rights += [topic_right(operation, app.report.topic) for operation in (Operation.WRITE, Operation.CREATE)]
    if app.commands is not None:
        commands_topic, audit = app.commands.topic, app.commands.audit_topic
        made |= {commands_topic: "commands", audit: "the audit"}
        rights += [topic_right(operation, commands_topic) for operation in (Operation.READ, Operation.CREATE)]
        rights += [topic_right(operation, audit) for operation in (Operation.WRITE, Operation.CREATE)]
        notes.append(f"commands: Write on {commands_topic} commands the app; the dashboard needs Read on {audit}")
        notes.append("commands: giving up messages without a dead-letter topic needs Write and Create on dlq.TOPIC")
    wanted = dict.fromkeys(
        right for right in rights if right.operation is not Operation.CREATE or right.name not in existing
    )
    return AppNeeds(topics, made, outputs, tuple(wanted), tuple(notes))


def _of_sink(name: str, sink: Any, topics: Iterable[str], app: App, notes: list[str]) -> list[Right]:
    """Return the permissions of a sink on the app's cluster, if it is one of penstock's sinks."""
    servers = getattr(sink, "bootstrap_servers", app.bootstrap_servers)
    if not hasattr(sink, "least_rights"):
        notes.append(f"sink {name}: the Kafka permissions of its function are unknown")
        return []
    if servers not in {None, app.bootstrap_servers}:
        notes.append(f"sink {name} writes to the brokers at {servers}: grant its permissions on them")
        return []
    found: list[Right] = sink.least_rights(topics)
    return found


def _of_coordinator(app: App, existing: Collection[str], made: dict[str, str], notes: list[str]) -> list[Right]:
    from penstock.transactions.wire.topics import StoreTopics

    option = app.effective["coordinator"]
    if option is False:
        return []
    notes.append("coordinator: grant Write on each topic that its producers send to")
    if option is not True:
        notes.append("coordinator: it has its own options; docs/security.md lists the permissions by store")
        return []
    topics = StoreTopics(app.effective["prefix"])
    made |= dict.fromkeys(sorted(topics.all - {topics.audit}), TRANSACTIONS)
    return topics.coordinator_rights(existing)


def commands(rights: Iterable[Right], principal: str, servers: str) -> list[str]:
    """Return the `kafka-acls` commands that grant the permissions."""
    server = "--bootstrap-server"
    return [right.command(principal).replace(f"{server} ...", f"{server} {servers}", 1) for right in rights]
