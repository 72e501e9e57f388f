"""Having a group pass over one message, which gets a dead letter: by members that run, or else in its offsets."""

from __future__ import annotations

import time
from typing import cast

from confluent_kafka import KafkaException

from penstock import clients
from penstock.clients.reading import NotReadInTimeError, PartitionReader
from penstock.clients.rights import Operation, principal_of
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.dead_letters.headers import DeadLetterFormat, DeadLetterOrigin, default_topic, write
from penstock.errors import BrokerConnectionError, GivenUpError, PenstockError
from penstock.fleet.actions.performing import Surroundings, perform
from penstock.fleet.commands.command import command_of
from penstock.fleet.topics import RecordWriter
from penstock.fleet_member import CommandSettings, Outcome
from penstock.group_offsets.group import Group, GroupState
from penstock.group_offsets.planning import Change, plan, refuse_coordinators, skip_wanted
from penstock.message import Record
from penstock.options import ClientConfig
from penstock.places import place_of

#: Seconds that reading the message may take.
_READ_BUDGET_S = 15.0
#: The topic's own limit decides.
_ANY_SIZE = {"message.max.bytes": 1_000_000_000}


class Skipping:
    """One message that a group is to pass over. `ConfigurationError` where `place` names none."""

    def __init__(self, bootstrap_servers: str, config: ClientConfig, known: Group, group: str, place: str) -> None:
        self._servers = bootstrap_servers
        self._config = config
        self._group = group
        self._known = known
        self.place = place
        self.topic, self.partition, self.offset = place_of(place)

    def state(self, *, to_change: bool = False) -> GroupState:
        """Return where the group stands in that partition; errors as `Group.state`."""
        refuse_coordinators(self._group, [self.topic])
        return self._known.state([f"{self.topic}:{self.partition}"], to_change=to_change)

    def by_members(self, commands: CommandSettings) -> str:
        """Have the members that run give the message up, and return what they said; `PenstockError` where none did."""
        given = {"group": self._group, "topic": self.topic, "partition": self.partition, "offset": self.offset}
        command = command_of("give-up", given, by="penstock offsets skip", asked_ms=int(time.time() * 1000))
        answer = perform(command, Surroundings(self._servers, self._config, commands))
        if answer.outcome is not Outcome.DONE:
            raise PenstockError(f"{answer.said}; or stop all members of {self._group}, and run the command again")
        return answer.said

    def planned(self, state: GroupState) -> Change:
        """Return the change of the offsets of a group without members; `PenstockError` where there is none to make."""
        (position,) = state.positions
        (change,) = plan(self._group, [skip_wanted(position, self.offset)])
        if change.cut:
            raise PenstockError(
                f"{self.place} was not passed over: so much is done above the commit point that a commit has no room "
                "for one more; let the app go on, and give the message up once it holds its partition"
            )
        return change

    def write(self, change: Change, letters: str | None = None) -> str:
        """Write the message to its dead letters, then the offsets; return the name of the topic that has it."""
        name = letters or default_topic(DeadLetterFormat.KAFKA).replace("{topic}", self.topic)
        # Before the dead letter is written: a second try after a refusal would write a second one.
        state = self.state(to_change=True)
        record, error = self._record(), GivenUpError(self.place, 0, "")
        headers = write(
            DeadLetterFormat.KAFKA, record, DeadLetterOrigin.of(record, error, group=self._group, attempts=0)
        )
        admin, principal = clients.admin(self._servers, self._config), principal_of(self._config)
        needs = {name: (Operation.WRITE,)}
        ensure_topics(admin, self._servers, [TopicSpec(name, 1)], needs=needs, principal=principal)
        writer = RecordWriter(self._servers, {**self._config, **_ANY_SIZE})
        writer.write(name, record.value(), record.key(), headers=headers)
        self._known.write(state, [change])
        return name

    def _record(self) -> Record:
        isolation = self._config.get("isolation.level", "read_committed")
        with PartitionReader(self._servers, self._config, self._group, isolation=isolation) as reader:
            try:
                found = reader.record_at((self.topic, self.partition), self.offset, _READ_BUDGET_S)
            except (KafkaException, NotReadInTimeError) as error:
                raise BrokerConnectionError(f"{self.place} did not come: {reader.trouble or 'no answer'}") from error
        if found is None:
            raise PenstockError(f"there is no message at {self.place}: it was deleted, or is not committed")
        return cast("Record", found)
