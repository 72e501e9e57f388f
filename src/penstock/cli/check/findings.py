"""What `penstock check` finds: the settings of an app, its topics and its rights, as values that print as JSON too."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import clients
from penstock.cli.check.needs import AppNeeds, needs_of_app
from penstock.clients.bounded_calls import ask_again
from penstock.clients.cluster import KafkaCluster
from penstock.clients.rights import Resource, Right, Rights, principal_of
from penstock.clients.topics import single_copies
from penstock.errors import BrokerConnectionError
from penstock.settings import shown_value

if TYPE_CHECKING:
    from penstock.app import App


#: Seconds that the first use of groups on a cluster may take, and between two looks.
_READY_S, _LOOK_S = 10.0, 0.3


@dataclass(frozen=True, slots=True)
class Setting:
    """An option as it is in the end."""

    name: str
    #: As it may be shown.
    value: str
    #: Where it stands.
    origin: str


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that an app works with."""

    name: str
    #: What it is for.
    use: str
    #: None: it is not there, or this client may not see it.
    partitions: int | None
    #: Whether the app does not start without it.
    required: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found."""

    needs: AppNeeds
    topics: tuple[Topic, ...]
    held: tuple[Right, ...]
    missing: tuple[Right, ...]
    #: Rights of which brokers tell nothing: on transactional ids, on what is not there, or without an authorizer.
    unknown: tuple[Right, ...]
    #: What is said of topics that have one copy on a cluster of three brokers or more.
    single_copies: tuple[str, ...] = ()
    #: Why there is nothing of topics and rights; None where a broker answered.
    failure: BrokerConnectionError | None = None

    @property
    def absent(self) -> tuple[Topic, ...]:
        """Topics without which the app does not start."""
        return tuple(topic for topic in self.topics if topic.required and topic.partitions is None)


def settings_of(app: App) -> list[Setting]:
    """Return the options of an app that can be set outside of its code, each with where it stands."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(type(app)).parameters.items()}
    found = []
    for name, value in app.effective.values.items():
        origin = app.effective.origin(name)
        if name == "config":
            keys = sorted(value)
            rows = [(f"config[{key!r}]", shown_value(key, value[key])) for key in keys]
            found += [Setting(key, text, app.effective.origin(key)) for key, text in rows]
        else:
            is_default = name not in app.effective.origins and value == defaults[name]
            text = shown_value(name, value) if isinstance(value, str) else _plain(value)
            found.append(Setting(name, text, "default" if is_default else origin))
    return found


def look(app: App) -> Findings:
    """Ask the cluster of an app for its topics and for the rights that it needs."""
    config = app.effective["config"]
    cluster = KafkaCluster(app.bootstrap_servers, config)
    try:
        there = cluster.topics()
        needs = needs_of_app(app, there)
        rights = _asked(cluster, needs.rights)
    except BrokerConnectionError as error:
        needs = needs_of_app(app, ())
        return Findings(needs, (), (), (), needs.rights, failure=error)
    topics = [
        *(Topic(name, use, there.get(name), required=True) for name, use in sorted(needs.topics.items())),
        *(Topic(name, use, there.get(name), required=False) for name, use in sorted(needs.made.items())),
    ]
    named = {topic.name for topic in topics} | {
        right.name for right in needs.rights if right.resource is Resource.TOPIC
    }
    single = single_copies(clients.admin(app.bootstrap_servers, config), named)
    return Findings(needs, tuple(topics), rights.held, rights.missing, rights.unknown, tuple(single))


def _asked(cluster: KafkaCluster, needed: Iterable[Right]) -> Rights:
    """Return what brokers tell of rights; a group's coordinator that is not ready yet is asked again for a while."""
    return ask_again(
        lambda: cluster.ask_rights(needed).wait(),
        _READY_S,
        _LOOK_S,
        until=lambda rights: all(right.resource is not Resource.GROUP for right in rights.unknown),
    )


def principal(app: App) -> str:
    """Return whom the brokers take the app for, as far as its settings tell."""
    return principal_of(app.effective["config"])


def as_rows(rights: Iterable[Right], state: str) -> list[dict[str, Any]]:
    """Return rights as JSON has them."""
    return [
        {
            "operation": right.operation.value,
            "resource": right.resource.value,
            "name": right.name,
            "prefix": right.is_prefix,
            "state": state,
        }
        for right in rights
    ]


def _plain(value: object) -> str:
    return str(value) if isinstance(value, bool | int | float) else f"<{type(value).__name__}>"
