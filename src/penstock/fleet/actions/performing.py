"""The one road of an action: planned, or carried out between two records of the audit, by members or by who asks.

What cannot be written to the audit beforehand is not done. All of it runs on a thread that may be abandoned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.dead_letters.reader import DeadLetterLog
from penstock.dead_letters.replay import Choice, Replay
from penstock.errors import PenstockError
from penstock.fleet.commands.audit import Answer, AuditRecord, Kind
from penstock.fleet.commands.carrying_out import answered, carry_out
from penstock.fleet.commands.command import ACTIONS, Command
from penstock.fleet.commands.sender import ANSWER_S, CommandSender, summary
from penstock.fleet.wire import one_line
from penstock.fleet_member import CommandSettings, Outcome
from penstock.group_offsets.group import Group
from penstock.group_offsets.planning import Change
from penstock.options import ClientConfig
from penstock.transactions.stores.coordinator import operator_in_kafka
from penstock.transactions.stores.kafka.administration import KafkaAdministration

_log = logging.getLogger(__name__)

#: Partitions that are named in a sentence.
_MOST_NAMED = 5


def _nobody(_group: str) -> Collection[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What actions work with: a cluster, and who there is.

    Attributes:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names; passwords are among them.
        commands: the topics of commands and of the audit.
        members: returns which members of a group hear commands, as far as that is known; any thread.
        answer_s: seconds that members have for an answer.
    """

    bootstrap_servers: str
    config: ClientConfig = field(default_factory=dict, repr=False)
    commands: CommandSettings = field(default_factory=CommandSettings)
    members: Callable[[str], Collection[str]] = _nobody
    answer_s: float = ANSWER_S

    def members_for(self, command: Command) -> Collection[str]:
        """Return the members that are to do it, as far as they are known."""
        return (command.member,) if command.member is not None else self.members(command.group)


def plan(command: Command, around: Surroundings) -> Answer:
    """Return what an action would do; REFUSED where it could not. Changes nothing."""
    if not command.is_for_members:
        return answered(command.name, lambda: _ASKERS[command.name](command, around, dry_run=True))
    whom = f"{command.member} of {command.group}"
    if command.member is None:
        known = ", ".join(sorted(around.members_for(command)))
        whom = f"all members of {command.group} that listen" + (f" ({known})" if known else "")
    return Answer(Outcome.DONE, ACTIONS[command.name].would.format(place=command.place, whom=whom))


def perform(command: Command, around: Surroundings) -> Answer:
    """Carry an action out between two records of the audit; return what came of it, whatever it raised."""
    try:
        sender = CommandSender(around.bootstrap_servers, around.config, around.commands)
        sender.tell(AuditRecord.of(Kind.ASKED, command, command.by), command.subject)
    except PenstockError as error:
        return Answer(Outcome.FAILED, f"nothing was done, for it cannot be written to the audit: {error}")
    answer = answered(command.name, lambda: _done(command, around, sender))
    _log.warning("%s, asked by %s (%s): %s", command.name, command.by, command.id, one_line(answer.said))
    try:
        # Stacks are in the members' own answers.
        said = Answer(answer.outcome, answer.said)
        sender.tell(AuditRecord.of(Kind.OUTCOME, command, command.by, said), command.subject)
    except PenstockError as error:
        _log.warning("the outcome of %s is not in the audit: %s", command.id, error)
        return replace(answer, said=f"{answer.said}; the audit lacks this outcome: {error}")
    return answer


def _done(command: Command, around: Surroundings, sender: CommandSender) -> Answer:
    if not command.is_for_members:
        return _ASKERS[command.name](command, around, dry_run=False)
    known = around.members_for(command)
    answers = sender.ask(command, known, around.answer_s)
    details = "\n\n".join(answer.details for answer in answers if answer.details)
    return Answer(*summary(command, answers, known), details or None)


def _offsets(command: Command, around: Surroundings, *, dry_run: bool) -> Answer:
    """Have a group without members begin elsewhere."""
    asked = command.parameters
    group = Group(around.bootstrap_servers, around.config, asked["group"])
    state, changes = group.planned_reset(asked["to"], asked.get("topics"), keep_done=asked.get("keep_done", False))
    if not dry_run:
        group.write(state, changes)
        return Answer(Outcome.DONE, f"group {asked['group']} begins elsewhere: {_moves(changes)}")
    said = f"group {asked['group']} would begin elsewhere: {_moves(changes)}"
    if not state.members:
        return Answer(Outcome.DONE, said)
    members = _counted(len(state.members), "member")
    return Answer(Outcome.REFUSED, f"{said}; but it has {members}, which commit their own: stop what runs")


def _replay(command: Command, around: Surroundings, *, dry_run: bool) -> Answer:
    """Send one dead letter back to the topic that it came from."""
    topic, partition, offset = (command.parameters[name] for name in ("topic", "partition", "offset"))
    with DeadLetterLog(around.bootstrap_servers, around.config) as log:
        log.at(topic, partition, offset)
        choice = Choice(place=(partition, offset), alone=True)
        work = Replay(log, topic, choice, limit=1, dry_run=dry_run)
        work.run()
    found = work.outcome
    if found.sent:
        would = "would be" if dry_run else "was"
        return Answer(Outcome.DONE, f"{command.place} {would} sent to {next(iter(found.sent))}")
    why = "an earlier replay sent it (`penstock dlq replay --again` sends it twice)"
    if found.left:
        why = f"it {next(iter(found.left)).value}"
    raise PenstockError(f"{command.place} was not sent: {why}")


def _operate(command: Command, around: Surroundings, *, dry_run: bool) -> Answer:
    """Decide a pending transaction of a store in Kafka, or bring a discarded one back, as an operator.

    The store has an audit of its own, too.
    """
    prefix, transaction_id = command.parameters["prefix"], command.parameters["transaction_id"]
    if not dry_run:
        return carry_out(command, operator_in_kafka(around.bootstrap_servers, prefix, around.config))
    with KafkaAdministration(around.bootstrap_servers, prefix, around.config) as store:
        if command.name == "settle":
            state, is_there = "pending", store.show(transaction_id) is not None
        else:
            discarded = (it.transaction_id for it in store.discarded())
            state, is_there = "among the discarded", transaction_id in discarded
    if not is_there:
        return Answer(Outcome.REFUSED, f"transaction {transaction_id} is not {state} in {prefix}")
    return Answer(Outcome.DONE, ACTIONS[command.name].would.format(place=command.place, whom="this dashboard"))


#: What who asks does, by the action's name; with `dry_run` it says what would be.
_ASKERS: Mapping[str, Callable[..., Answer]] = {
    "offsets": _offsets,
    "replay": _replay,
    "settle": _operate,
    "resume-transaction": _operate,
}


def _moves(changes: Sequence[Change]) -> str:
    """Say which offsets become which, and what that means."""
    again, skipped = sum(change.again for change in changes), sum(change.skipped for change in changes)
    named = [
        f"{change.before.place} from {'nothing' if change.before.committed is None else change.before.committed} to "
        f"{change.offset}"
        for change in changes
    ]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    places = ", ".join(named[:_MOST_NAMED]) + more or "no partition"
    return f"{places}; {_counted(again, 'message')} handled again, {_counted(skipped, 'message')} skipped"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
