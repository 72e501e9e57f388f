"""`penstock lag`: how far behind a group is, in messages and in time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.offsets.command import GroupName, Topics
from penstock.cli.options.connection import BootstrapServers, ClientSettings, ConfigFile, client_settings
from penstock.cli.output import print_error

if TYPE_CHECKING:
    from penstock.group_offsets.group import GroupState
    from penstock.group_offsets.oldest import Oldest
    from penstock.group_offsets.positions import Part


def lag(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: BootstrapServers,
    group: GroupName,
    topic: Topics = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that reading the oldest messages may take.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
) -> None:
    """Tell by partition how far behind a group is, and how old its oldest message is that is not done.

    Exit codes: 0 done, 1 failed, or some ages are not known, 2 wrong use, 3 no broker.
    """
    from penstock.cli.offsets.text import lag_lines, print_lag
    from penstock.group_offsets.group import Group
    from penstock.group_offsets.moving import looked_at
    from penstock.group_offsets.oldest import oldest_not_done

    settings = client_settings(config, config_file)
    known = Group(bootstrap_servers, settings, group)
    state = looked_at(known, topic)
    read = oldest_not_done(bootstrap_servers, settings, group, state.positions, timeout)
    now_s = time.time()
    ages = {part: (message, message.age_s(now_s)) for part, message in read.messages.items() if message is not None}
    if as_json:
        typer.echo(json.dumps(_as_json(state, ages)))
    else:
        print_lag(state.positions, ages)
        for line in lag_lines(state.positions, ages):
            typer.echo(line)
    for failure in read.failures:
        print_error(failure)
    if read.failures:
        raise typer.Exit(1)


def _as_json(state: GroupState, ages: Mapping[Part, tuple[Oldest, float | None]]) -> dict[str, Any]:
    rows = []
    for position in state.positions:
        oldest, age_s = ages.get(position.part, (None, None))
        rows.append(
            {
                "topic": position.topic,
                "partition": position.partition,
                "committed": position.committed,
                "log_end": None if position.log is None else position.log.stop,
                "lag": position.lag,
                "done_above": position.done_above,
                "not_done": position.left,
                "oldest_not_done": None if oldest is None else oldest.offset,
                "oldest_age_s": None if age_s is None else round(age_s, 3),
            }
        )
    return {
        "group": state.group,
        "lag": sum(position.lag or 0 for position in state.positions),
        "not_done": sum(position.left or 0 for position in state.positions),
        "unknown": sum(position.lag is None for position in state.positions),
        "oldest_age_s": max((round(age_s, 3) for _, age_s in ages.values() if age_s is not None), default=None),
        "partitions": rows,
    }
