"""`penstock lag`: the lag of a group, in messages and in time."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from penstock.cli.offsets import done_above, group_of, odd_positions
from penstock.cli.options import GroupName, Partitions, Reading
from penstock.cli.output import Result, Table
from penstock.errors import PenstockError
from penstock.places import age_text, counted, place_text


def lag(
    cluster: Reading,
    *,
    group: GroupName,
    topic: Partitions = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Timeout in seconds for reading the oldest messages.")
    ] = 15.0,
) -> Result:
    """Print the lag of each partition of a group, and the age of its oldest message that is not done.

    Ends with 1 if some ages are unknown.
    """
    from penstock.group_offsets.oldest import oldest_not_done

    positions = group_of(cluster, group).state(topic).positions
    messages, failures = oldest_not_done(cluster.servers, cluster.settings, group, positions, timeout)
    now_s = time.time()
    rows = []
    oldest_s, oldest_place = None, ""
    for position in positions:
        oldest = messages.get(position.part)
        age_s = None if oldest is None else oldest.age_s(now_s)
        if oldest is not None and age_s is not None and (oldest_s is None or age_s > oldest_s):
            oldest_s, oldest_place = age_s, place_text(*position.part, oldest.offset)
        rows.append(
            {
                "topic": position.topic,
                "partition": position.partition,
                "committed": position.committed,
                "log_end": position.log.stop,
                "lag": position.lag,
                "done_above": done_above(position),
                "not_done": position.left,
                "oldest_not_done": None if oldest is None else oldest.offset,
                "oldest_age_s": None if age_s is None else round(age_s, 3),
            }
        )
    lags = [position.lag for position in positions if position.lag is not None]
    unknown = len(positions) - len(lags)
    total = sum(lags) if lags else None
    not_done = sum(position.left or 0 for position in positions) if lags else None
    facts = {"group": group, "lag": total, "not_done": not_done, "unknown": unknown, "oldest_age_s": oldest_s}
    oldest_text = "" if oldest_s is None else f"; the oldest, {oldest_place}, is {age_text(oldest_s)} old"
    unknown_text = f" (and {unknown} with unknown lag)" if unknown else ""
    text = f"lag {total} in {counted(len(lags), 'partition')}{unknown_text}, {not_done} of it not done{oldest_text}"
    if not lags:
        text = f"lag unknown in {counted(unknown, 'partition')}"
    failure = PenstockError("; ".join(failures)) if failures else None
    return Result([Table("partitions", rows)], facts, notes=[text, *odd_positions(positions)], failure=failure)
