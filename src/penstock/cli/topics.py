"""`penstock topics`: creates the topics that an app needs, before it is started."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import CONNECT_TIMEOUT_S, MOST_COUNT, AppOptions, ConnectTimeout, DryRun
from penstock.cli.output import Result, Table
from penstock.places import counted


def create(
    app_options: AppOptions,
    *,
    every: Annotated[
        bool, typer.Option("--all", help="Also create the topics that the app reads, and the topics of its results.")
    ] = False,
    partitions: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_COUNT, help="With --all: partitions of the topics that the app reads, and of its results."
        ),
    ] = 1,
    dry_run: DryRun = False,
    connect_timeout: ConnectTimeout = CONNECT_TIMEOUT_S,
) -> Result:
    """Create an app's absent topics for dead letters, retries, transactions, reports and commands.

    An app with the permission Create makes them itself. Without it, run this command as a user who has the permission.
    Existing topics are not changed.
    """
    from penstock import clients
    from penstock.cli.needs import TRANSACTIONS, needs_of_app
    from penstock.clients.cluster import Cluster
    from penstock.clients.topics import TopicSpec, partition_counts
    from penstock.consumer.poll.topics import create_outputs
    from penstock.fleet.commands.audit import audit_spec, commands_spec
    from penstock.fleet.reports.reporter import topic_spec
    from penstock.transactions.wire.topics import DEFAULT_PARTITIONS, open_topics

    app = app_options.load()
    config, servers = app.effective["config"], app.bootstrap_servers
    cluster = Cluster(servers, config)
    existing = partition_counts(clients.admin(servers, config), connect_timeout)
    needs = needs_of_app(app, existing)
    uses = needs.topics | needs.made
    wanted = [name for name in uses if name not in existing and (every or name in needs.made)]
    if not dry_run:
        cluster.ensure_topics(TopicSpec(name, partitions) for name in wanted if name in needs.topics)
        counts = cluster.topics()
        outputs = {name: tuple(sources) for name, sources in needs.outputs.items() if name in wanted}
        create_outputs(cluster, {**{name: 1 for sources in outputs.values() for name in sources}, **counts}, outputs)
        if any(needs.made.get(name) == TRANSACTIONS for name in wanted):
            open_topics(clients.admin(servers, config), app.effective["prefix"], DEFAULT_PARTITIONS)
        specs = {}
        if app.report is not None:
            specs[app.report.topic] = topic_spec(app.report.topic)
        if app.commands is not None:
            specs[app.commands.topic] = commands_spec(app.commands.topic)
            specs[app.commands.audit_topic] = audit_spec(app.commands.audit_topic)
        cluster.ensure_topics(spec for name, spec in specs.items() if name in wanted)
    now = existing if dry_run else cluster.topics()
    made = "missing" if dry_run else "created"
    rows = [
        {
            "topic": name,
            "for": use,
            "partitions": now.get(name),
            "state": "there" if name in existing else made if name in wanted else "missing: see --all",
        }
        for name, use in sorted(uses.items())
    ]
    count = counted(len(wanted), "topic")
    notes = [f"a dry run: {count} would be created" if dry_run else f"{count} created"]
    notes += [note for note in needs.notes if note.startswith("sink ")]
    return Result([Table("topics", rows)], {"app": app.name, "dry_run": dry_run}, notes=notes)
