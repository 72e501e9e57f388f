"""`penstock lag`: how far behind a group is, in messages and in time."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from penstock.cli.offsets import done_above, group_of, odd_positions
from penstock.cli.options import GroupName, Partitions, Reading
from penstock.cli.output import Result, Table, age_text, counted
from penstock.errors import PenstockError
from penstock.places import place_text


def lag(
    cluster: Reading,
    *,
    group: GroupName,
    topic: Partitions = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that reading the oldest messages may take.")] = 15.0,
) -> Result:
    """Tell by partition how far behind a group is, and how old its oldest message is that is not done.

    Ends with 1 where some ages are not known.
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
    total, left = sum(position.lag or 0 for position in positions), sum(position.left or 0 for position in positions)
    unknown = sum(position.lag is None for position in positions)
    facts = {"group": group, "lag": total, "not_done": left, "unknown": unknown, "oldest_age_s": oldest_s}
    last = "" if oldest_s is None else f"; the oldest, {oldest_place}, is {age_text(oldest_s)} old"
    more = f" (and {unknown} whose lag is not known)" if unknown else ""
    text = f"lag {total} in {counted(len(positions) - unknown, 'partition')}{more}, {left} of it not done{last}"
    failure = PenstockError("; ".join(failures)) if failures else None
    return Result([Table("partitions", rows)], facts, notes=[text, *odd_positions(positions)], failure=failure)
