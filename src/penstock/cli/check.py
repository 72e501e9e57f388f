"""`penstock check`: the settings of an app, its connection, its topics and its permissions, before it is started."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import CONNECT_TIMEOUT_S, AppOptions, ConnectTimeout
from penstock.cli.output import Result, Table
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.cli.needs import AppNeeds
    from penstock.clients.rights import Rights

#: The timeout in seconds for the first use of groups on a cluster, and the delay between two requests.
_GROUP_READY_BUDGET_S, _RETRY_DELAY_S = 10.0, 0.3


def check(
    app_options: AppOptions,
    *,
    principal: Annotated[
        str | None,
        typer.Option(
            metavar="User:NAME", help="The user in the kafka-acls commands. Default: the user of this client."
        ),
    ] = None,
    connect_timeout: ConnectTimeout = CONNECT_TIMEOUT_S,
) -> Result:
    """Check an app's settings, topics and permissions without starting it. Changes nothing.

    It prints each setting and its source, without secrets. It asks the brokers for the app's topics and permissions.
    It prints the permissions that the app needs, with its sinks and its coordinator, as kafka-acls commands. Ends with
    1 if a topic or a permission is missing.
    """
    from penstock import clients
    from penstock.cli.needs import commands, needs_of_app
    from penstock.clients.cluster import Cluster
    from penstock.clients.rights import Resource, principal_of
    from penstock.clients.topics import partition_counts, single_copies
    from penstock.errors import BrokerConnectionError

    app = app_options.load()
    config, servers = app.effective["config"], app.bootstrap_servers
    user = principal or principal_of(config)
    cluster = Cluster(servers, config)
    tables, notes = [Table("settings", list(_settings(app)))], list[str]()
    failure: PenstockError | None
    try:
        existing = partition_counts(clients.admin(servers, config), connect_timeout)
        needs = needs_of_app(app, existing)
        rights = _rights_of(cluster, needs)
    except BrokerConnectionError as error:
        needs, failure = needs_of_app(app, ()), error
    else:
        topics = list(_topics(needs, existing))
        named = {row["topic"] for row in topics}
        named |= {right.name for right in needs.rights if right.resource is Resource.TOPIC}
        failure = _failure(app, topics, rights, user)
        tables += [Table("topics", topics), Table("rights", list(_rights(rights)), ("state", "permission"))]
        notes.append(f"brokers at {servers} answer, as {user}")
        notes += [f"warning: {text}" for text in single_copies(clients.admin(servers, config), named)]
        if rights.unknown:
            notes.append("unknown: brokers do not report permissions on transactional ids and on absent topics")
    acls = commands(needs.rights, user, servers)
    notes += ["The permissions that the app needs:", *acls, *(f"# {note}" for note in needs.notes)]
    facts = {
        "app": app.name,
        "ok": failure is None,
        "bootstrap_servers": servers,
        "principal": user,
        "commands": acls,
    }
    return Result(tables, facts, lines=[f"app {app.name}"], notes=notes, failure=failure)


def _settings(app: App) -> Iterator[dict[str, str]]:
    """Yield the options of an app that can be set outside of its code, each with its source."""
    from penstock.settings import shown_value

    defaults = {name: parameter.default for name, parameter in inspect.signature(type(app)).parameters.items()}
    for name, value in app.effective.values.items():
        origin = app.effective.origin(name)
        if name == "config":
            for key in sorted(value):
                text = shown_value(key, value[key])
                setting = f"config[{key!r}]"
                yield {"name": setting, "value": text, "origin": app.effective.origin(setting)}
            continue
        is_default = name not in app.effective.origins and value == defaults[name]
        text = "none" if value is None else shown_value(name, value)
        yield {"name": name, "value": text, "origin": "default" if is_default else origin}


def _rights_of(cluster: Any, needs: AppNeeds) -> Rights:
    """Return the brokers' answer on permissions; ask again for some seconds if a group's coordinator is not ready."""
    from penstock.clients.bounded_calls import ask_again
    from penstock.clients.rights import Resource

    def is_ready(rights: Rights) -> bool:
        return all(right.resource is not Resource.GROUP for right in rights.unknown)

    found: Rights = ask_again(
        lambda: cluster.ask_rights(needs.rights).wait(), _GROUP_READY_BUDGET_S, _RETRY_DELAY_S, until=is_ready
    )
    return found


def _topics(needs: AppNeeds, existing: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for uses, absent in ((needs.topics, "missing"), (needs.made, "made at the start")):
        for name, use in sorted(uses.items()):
            state = "there" if name in existing else absent
            yield {"topic": name, "for": use, "partitions": existing.get(name), "state": state}


def _rights(rights: Rights) -> Iterator[dict[str, Any]]:
    for state, found in (("ok", rights.held), ("missing", rights.missing), ("unknown", rights.unknown)):
        for right in found:
            fields = {"operation": right.operation, "resource": right.resource, "name": right.name}
            text = str(right)  # `right` is the deprecated name of `permission` in JSON; the next release removes it
            yield {"state": state, "permission": text, "right": text, **fields, "prefix": right.is_prefix}


def _failure(app: App, topics: list[dict[str, Any]], rights: Rights, user: str) -> PenstockError | None:
    from penstock.clients.rights import MissingRightError
    from penstock.errors import TopicNotFoundError

    if rights.missing:
        named = ", ".join(map(str, rights.missing))
        return MissingRightError.from_text(
            f"app {app.name} cannot start: {user} lacks the permission {named}; an administrator can grant it with "
            "the commands above",
            tuple(rights.missing),
        )
    if absent := [row["topic"] for row in topics if row["state"] == "missing"]:
        return TopicNotFoundError(
            f"app {app.name} cannot start: no topic {', '.join(absent)} at {app.bootstrap_servers}; create it, for "
            "example with `penstock topics create MODULE:APP --all`, or correct the name"
        )
    return None
