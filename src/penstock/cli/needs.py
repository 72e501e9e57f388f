"""What an app asks of a cluster, sinks and coordinator included: topics and the least rights. Nothing is asked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.clients.rights import Operation, Right, group_right, topic_right
from penstock.spark_sink.queries.sink_specs import group_of_sinks

if TYPE_CHECKING:
    from penstock.app import App

#: What topics of a transaction store are for.
TRANSACTIONS = "transactions"


@dataclass(frozen=True, slots=True)
class AppNeeds:
    """What an app asks of its cluster."""

    #: Topics that have to be there, each with what it is for.
    topics: dict[str, str]
    #: Topics that the start makes where they are absent.
    made: dict[str, str]
    #: Those of them that are for dead letters and retries, each with the topics that it takes messages of.
    outputs: Mapping[str, Sequence[str]]
    rights: tuple[Right, ...]
    #: What the app alone does not show.
    notes: tuple[str, ...]


def needs_of_app(app: App, there: Collection[str]) -> AppNeeds:
    """Return what an app asks of a cluster where the topics `there` are. Raises as `LitePushConsumer.needs`."""
    topics, made, rights, notes = dict[str, str](), dict[str, str](), list[Right](), list[str]()
    outputs: Mapping[str, Sequence[str]] = {}
    if app.consumes:
        needs = app.consumer().needs(there)
        topics |= dict.fromkeys(needs.results, "results") | dict.fromkeys(needs.consumed, "read")
        outputs = needs.outputs
        made |= {name: "retries" if name in needs.retries else "dead letters" for name in outputs}
        rights += needs.rights
        if app.patterns:
            notes.append("patterns: rights on topics that they match later are missing from the list")
        notes.append("a handler that returns an Outgoing needs Write on its topic too")
    rights += [group_right(group_of_sinks(app.name))] if app.sinks else []
    for spec in app.sinks:
        topics |= dict.fromkeys(spec.topics, f"read by the sink {spec.name}")
        rights += [topic_right(Operation.READ, name) for name in spec.topics]
        rights += _of_sink(spec.name, spec.function, spec.topics, app, notes)
    rights += _of_coordinator(app, there, made, notes)
    if app.report is not None:
        made[app.report.topic] = "reports"
        rights += [topic_right(operation, app.report.topic) for operation in (Operation.WRITE, Operation.CREATE)]
    if app.commands is not None:
        heard, audit = app.commands.topic, app.commands.audit_topic
        made |= {heard: "commands", audit: "the audit"}
        rights += [topic_right(operation, heard) for operation in (Operation.READ, Operation.CREATE)]
        rights += [topic_right(operation, audit) for operation in (Operation.WRITE, Operation.CREATE)]
        notes.append(f"commands: who has Write on {heard} commands the app; the dashboard needs Read on {audit}, too")
        notes.append("commands: to give up what has no dead letters, give Write, and Create, on dlq.* of its topic")
    wanted = dict.fromkeys(
        right for right in rights if right.operation is not Operation.CREATE or right.name not in there
    )
    return AppNeeds(topics, made, outputs, tuple(wanted), tuple(notes))


def _of_sink(name: str, sink: Any, topics: Iterable[str], app: App, notes: list[str]) -> list[Right]:
    """Return the rights of what stores the batches, where it is one of ours, on the app's cluster."""
    servers = getattr(sink, "bootstrap_servers", app.bootstrap_servers)
    if not hasattr(sink, "least_rights"):
        notes.append(f"sink {name}: what its function asks Kafka for by itself is not known")
        return []
    if servers not in {None, app.bootstrap_servers}:
        notes.append(f"sink {name} writes to the brokers at {servers}: give its rights there")
        return []
    found: list[Right] = sink.least_rights(topics)
    return found


def _of_coordinator(app: App, there: Collection[str], made: dict[str, str], notes: list[str]) -> list[Right]:
    from penstock.transactions.wire.topics import StoreTopics

    given = app.effective["coordinator"]
    if given is False:
        return []
    notes.append("coordinator: give Write on each topic that its producers send to")
    if given is not True:
        notes.append("coordinator: it has arguments of its own; its rights by its store are in docs/security.md")
        return []
    topics = StoreTopics(app.effective["prefix"])
    made |= dict.fromkeys(sorted(topics.all - {topics.audit}), TRANSACTIONS)
    return topics.coordinator_rights(there)


def commands(rights: Iterable[Right], principal: str, servers: str) -> list[str]:
    """Return the lines of `kafka-acls` that give the rights."""
    server = "--bootstrap-server"
    return [right.command(principal).replace(f"{server} ...", f"{server} {servers}", 1) for right in rights]
