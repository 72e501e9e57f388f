"""Having a group pass over one message, which gets a dead letter: by members that run, or else in its offsets."""

from __future__ import annotations

import time
from typing import cast

from penstock.clients.cluster import Cluster
from penstock.clients.reading import read_record
from penstock.consumer.poll.topics import create_outputs
from penstock.dead_letters.headers import DeadLetterFormat, DeadLetterOrigin, write
from penstock.errors import GivenUpError, PenstockError
from penstock.fleet.actions.performing import Surroundings, perform
from penstock.fleet.commands.command import command_of
from penstock.fleet.topics import RecordWriter
from penstock.fleet_member import Outcome
from penstock.message import Record
from penstock.options import ClientConfig
from penstock.places import place_text

#: Seconds that reading the message may take.
_READ_BUDGET_S = 15.0
#: The topic's own limit decides.
_ANY_SIZE = {"message.max.bytes": 1_000_000_000}


def given_up_by_members(around: Surroundings, group: str, topic: str, partition: int, offset: int) -> str:
    """Have the members that run give a message up, and return what they said; `PenstockError` where none did."""
    given = {"group": group, "topic": topic, "partition": partition, "offset": offset}
    command = command_of("give-up", given, by="penstock offsets skip", asked_ms=int(time.time() * 1000))
    answer = perform(command, around)
    if answer.outcome is not Outcome.DONE:
        raise PenstockError(f"{answer.said}; or stop all members of {group}, and run the command again")
    return answer.said


def write_dead_letter(
    servers: str, config: ClientConfig, group: str, part: tuple[str, int], offset: int, *, letters: str
) -> None:
    """Write a message to a dead-letter topic, which is made as an app makes it where it is absent.

    Raises as `read_record`.
    """
    record = cast("Record", read_record(servers, config, part, offset, _READ_BUDGET_S))
    error = GivenUpError(place_text(*part, offset), 0, "")
    origin = DeadLetterOrigin.of(record, error, group=group, attempts=0)
    cluster = Cluster(servers, config)
    create_outputs(cluster, cluster.require_topics([part[0]]), {letters: (part[0],)})
    headers = write(DeadLetterFormat.KAFKA, record, origin)
    RecordWriter(servers, {**config, **_ANY_SIZE}).write(letters, record.value(), record.key(), headers=headers)
