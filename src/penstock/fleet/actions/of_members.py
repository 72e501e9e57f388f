"""Actions that members and coordinators carry out, which are told by the topic of commands: see `Command`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from penstock.fleet.actions.action import Asked, Result, Surroundings
from penstock.fleet.actions.parameters import Parameters
from penstock.fleet.commands.command import Command
from penstock.fleet.commands.sender import CommandSender, summary
from penstock.fleet_member import Outcome

_WOULD = {
    "pause": "{place} would be paused for {whom}: what was taken in is finished, and nothing more fetched until it is "
    "resumed, or the process starts again",
    "resume": "{place} would go on for {whom}",
    "stacks": "the stacks of all threads of {whom} would be shown, which names its functions",
    "give-up": "{place} would be given up by {whom}: it goes to its dead letters, and its key goes on",
    "settle": "{place} would be decided by {whom}, in its store",
    "resume-transaction": "{place} would be brought back by {whom}, undecided; its group is asked again",
}


@dataclass(frozen=True, slots=True)
class MemberAction:
    """A command, and what is said of it."""

    command: Command

    @property
    def group(self) -> str:
        """The group whose members do it."""
        return self.command.group

    def plan(self, around: Surroundings) -> Result:
        """Say what would be done, and by whom."""
        known = self._members(around)
        command = self.command
        if command.member is not None:
            whom = f"{command.member} of {command.group}"
        else:
            whom = f"all members of {command.group} that listen" + (f" ({', '.join(sorted(known))})" if known else "")
        return Result(Outcome.DONE, _WOULD[command.name].format(place=command.place, whom=whom))

    def run(self, around: Surroundings, asked: Asked, sender: CommandSender) -> Result:
        """Tell the members, and hear what they did."""
        told = replace(self.command, id=asked.id, by=asked.by, asked_ms=asked.at_ms)
        known = self._members(around)
        answers = sender.ask(told, known, around.answer_s)
        outcome, said = summary(told, answers, known)
        details = "\n\n".join(answer.details for answer in answers if answer.details)
        return Result(outcome, said, details or None)

    def _members(self, around: Surroundings) -> Collection[str]:
        return (self.command.member,) if self.command.member is not None else around.members(self.command.group)


def pause(given: Parameters) -> MemberAction:
    """Return the action that pauses a topic, or a partition of it."""
    return _of_topic("pause", given)


def resume(given: Parameters) -> MemberAction:
    """Return the action that has it go on."""
    return _of_topic("resume", given)


def stacks(given: Parameters) -> MemberAction:
    """Return the action that shows the stacks of a member."""
    return MemberAction(Command("stacks", given.text("group"), given.text("member")))


def give_up(given: Parameters) -> MemberAction:
    """Return the action that gives up the message which holds a partition."""
    group, member, topic = given.text("group"), given.text("member"), given.text("topic")
    place = given.number("partition"), given.number("offset")
    return MemberAction(Command("give-up", group, member, topic, *place))


def _of_topic(name: str, given: Parameters) -> MemberAction:
    group, topic, partition = given.text("group"), given.text("topic"), given.number_or_none("partition")
    return MemberAction(Command(name, group, given.text_or_none("member"), topic, partition))
