"""What `penstock doctor --app` says of an app's rights: what it needs, what it has, and what gives the rest."""

from __future__ import annotations

import typer

from penstock.cli.run import load_app
from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError


def check_rights(target: str) -> None:
    """Print the rights that an app needs on the cluster it reads.

    Raises:
        MissingRightError: some are missing; all those are named.
        ConfigurationError: there is no such app, or it has no handler.
        BrokerConnectionError: no broker answered.
        TopicNotFoundError: a topic that it reads does not exist.
    """
    app = load_app(target)
    if not app.handlers:
        raise ConfigurationError(f"{target} has no handler to check the rights of; its sinks say at their start")
    found, principal = app.consumer().check_rights()
    for mark, rights in (("ok", found.held), ("missing", found.missing), ("not told", found.unknown)):
        for right in rights:
            typer.echo(f"{mark:<9}{right}")
    if found.unknown:
        typer.echo("not told: the topic is not there yet, and the start needs Create on it; or brokers tell no rights")
    if found.missing:
        raise MissingRightError(f"app {app.name} cannot start", found.missing, principal)


__all__ = ["check_rights"]
