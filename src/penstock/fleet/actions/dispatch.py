"""The dispatch of actions: a dry run, or the execution between two records of the audit.

Members execute an action, or the process of the caller does. If the first record cannot be written, nothing is done.
All functions run on a disposable thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.dead_letters.reader import DeadLetterLog
from penstock.dead_letters.replay import Replay, Selection
from penstock.errors import PenstockError
from penstock.fleet.commands.audit import Answer, AuditRecord, Kind
from penstock.fleet.commands.command import ACTIONS, Command
from penstock.fleet.commands.execution import answer_of, execute
from penstock.fleet.commands.sender import ANSWER_S, CommandSender, summary
from penstock.fleet_member import CommandSettings, Outcome
from penstock.group_offsets.group import Group
from penstock.group_offsets.planning import Change
from penstock.options import ClientConfig
from penstock.places import counted
from penstock.transactions.stores.coordinator import operator_in_kafka
from penstock.transactions.stores.kafka.administration import KafkaAdministration

#: The number of partitions named in a sentence.
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class ActionContext:
    """The cluster of an action, and the members known there.

    Attributes:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names; it can hold passwords.
        commands: the topics of commands and of the audit.
        members: returns the members of a group that are known to receive commands. Any thread may call it.
        answer_s: the answer timeout of members in seconds.
    """

    bootstrap_servers: str
    config: ClientConfig = field(default_factory=dict, repr=False)
    commands: CommandSettings = field(default_factory=CommandSettings)
    members: Callable[[str], Collection[str]] = lambda _group: ()
    answer_s: float = ANSWER_S

    def members_for(self, command: Command) -> Collection[str]:
        """Return the known members that receive a command."""
        return (command.member,) if command.member is not None else self.members(command.group)


def plan(command: Command, context: ActionContext) -> Answer:
    """Return what an action would do, REFUSED if it is impossible. Changes nothing."""
    if not command.is_for_members:
        return answer_of(command.name, lambda: _OF_CALLER[command.name](command, context, dry_run=True))
    whom = f"{command.member} of {command.group}"
    if command.member is None:
        known = ", ".join(sorted(context.members_for(command)))
        whom = f"all members of {command.group} that listen" + (f" ({known})" if known else "")
    return Answer(Outcome.DONE, ACTIONS[command.name].would.format(place=command.place, whom=whom))


def perform(command: Command, context: ActionContext) -> Answer:
    """Perform an action between two records of the audit; return its answer, also if it raised."""
    try:
        sender = CommandSender(context.bootstrap_servers, context.config, context.commands)
        sender.append(AuditRecord.of(Kind.ASKED, command, command.by), command.key)
    except PenstockError as error:
        return Answer(Outcome.FAILED, f"nothing was done, because it cannot be written to the audit: {error}")
    answer = answer_of(command.name, lambda: _perform(command, context, sender))
    try:
        # Stacks are in the members' own answers.
        outcome = Answer(answer.outcome, answer.said)
        sender.append(AuditRecord.of(Kind.OUTCOME, command, command.by, outcome), command.key)
    except PenstockError as error:
        return replace(answer, said=f"{answer.said}; the audit lacks this outcome: {error}")
    return answer


def _perform(command: Command, context: ActionContext, sender: CommandSender) -> Answer:
    if not command.is_for_members:
        return _OF_CALLER[command.name](command, context, dry_run=False)
    known = context.members_for(command)
    answers = sender.ask(command, known, context.answer_s)
    details = "\n\n".join(answer.details for answer in answers if answer.details)
    return Answer(*summary(command, answers, known), details or None)


def _offsets(command: Command, context: ActionContext, *, dry_run: bool) -> Answer:
    """Reset the offsets of a group without members."""
    wanted = command.parameters
    name = wanted["group"]
    group = Group(context.bootstrap_servers, context.config, name)
    state, changes = group.planned_reset(wanted["to"], wanted.get("topics"), keep_done=wanted.get("keep_done", False))
    if not dry_run:
        group.write(state, changes)
        return Answer(Outcome.DONE, f"the offsets of group {name} are changed: {_moves(changes)}")
    said = f"the offsets of group {name} would be changed: {_moves(changes)}"
    if not state.members:
        return Answer(Outcome.DONE, said)
    members = counted(len(state.members), "member")
    return Answer(Outcome.REFUSED, f"{said}; but it has {members}, which commit their own: stop them first")


def _replay(command: Command, context: ActionContext, *, dry_run: bool) -> Answer:
    """Send one dead letter back to its original topic."""
    topic, partition, offset = (command.parameters[name] for name in ("topic", "partition", "offset"))
    with DeadLetterLog(context.bootstrap_servers, context.config) as log:
        log.at(topic, partition, offset)
        replay = Replay(log, topic, Selection(place=(partition, offset), is_single=True), limit=1, dry_run=dry_run)
        replay.run()
    found = replay.outcome
    if found.sent:
        would = "would be" if dry_run else "was"
        return Answer(Outcome.DONE, f"{command.place} {would} sent to {next(iter(found.sent))}")
    why = "an earlier replay sent it (`penstock dlq replay --again` sends it twice)"
    if found.unsent:
        why = f"it {next(iter(found.unsent)).value}"
    raise PenstockError(f"{command.place} was not sent: {why}")


def _operate(command: Command, context: ActionContext, *, dry_run: bool) -> Answer:
    """Decide a pending transaction of a store in Kafka, or bring a discarded one back, as an operator.

    The store writes its own audit as well.
    """
    prefix, transaction_id = command.parameters["prefix"], command.parameters["transaction_id"]
    if not dry_run:
        return execute(command, operator_in_kafka(context.bootstrap_servers, prefix, context.config))
    with KafkaAdministration(context.bootstrap_servers, prefix, context.config) as store:
        if command.name == "settle":
            state, exists = "pending", store.show(transaction_id) is not None
        else:
            discarded = (transaction.transaction_id for transaction in store.discarded())
            state, exists = "among the discarded", transaction_id in discarded
    if not exists:
        return Answer(Outcome.REFUSED, f"transaction {transaction_id} is not {state} in {prefix}")
    return Answer(Outcome.DONE, ACTIONS[command.name].would.format(place=command.place, whom="this dashboard"))


#: The actions that the caller's process executes, by name; with `dry_run` they only say what they would do.
_OF_CALLER: Mapping[str, Callable[..., Answer]] = {
    "offsets": _offsets,
    "replay": _replay,
    "settle": _operate,
    "resume-transaction": _operate,
}


def _moves(changes: Sequence[Change]) -> str:
    """Return the changes of offsets and their meaning, in words."""
    again, skipped = sum(change.again for change in changes), sum(change.skipped for change in changes)
    named = [
        f"{change.before.place} from {'nothing' if change.before.committed is None else change.before.committed} to "
        f"{change.offset}"
        for change in changes
    ]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    places = ", ".join(named[:_MOST_NAMED]) + more or "no partition"
    return f"{places}; {counted(again, 'message')} handled again, {counted(skipped, 'message')} skipped"
