"""Carrying out a command in a member or a coordinator: what each name does, and the answer."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import BrokerConnectionError, DecisionNotStoredError, NotGivenUpError, PenstockError
from penstock.fleet.commands.audit import MOST_DETAILS
from penstock.fleet.commands.command import Command
from penstock.fleet_member import Member, Outcome, StoreOperator

_log = logging.getLogger(__name__)

#: Calls of a stack that are shown.
_MOST_FRAMES = 40


@dataclass(frozen=True, slots=True)
class Answer:
    """What a member answers to a command."""

    outcome: Outcome
    said: str
    details: str | None = None


def carry_out(command: Command, doing: Member | StoreOperator) -> Answer:
    """Do what a command says; return what came of it, whatever that raises."""
    try:
        if isinstance(doing, StoreOperator):
            return _operate(command, doing)
        return _DOING.get(command.name, _not_of_members)(command, doing)
    except (DecisionNotStoredError, BrokerConnectionError) as error:
        # What was asked may have been done.
        return Answer(Outcome.FAILED, str(error))
    except NotGivenUpError as error:
        return Answer(Outcome.SENT if error.is_under_way else Outcome.REFUSED, str(error))
    except PenstockError as error:
        return Answer(Outcome.REFUSED, str(error))
    except Exception as error:  # noqa: BLE001 - its text may be anything; the log is the member's own
        _log.exception("command %s (%s) failed", command.name, command.id)
        return Answer(Outcome.FAILED, f"{command.name} failed with {type(error).__name__}; the member's log says where")


def _pause(command: Command, member: Member) -> Answer:
    member.pause(_topic(command), command.partition)
    return Answer(Outcome.DONE, f"{command.place} is paused: what was taken in is finished, and nothing more fetched")


def _resume(command: Command, member: Member) -> Answer:
    member.resume(_topic(command), command.partition)
    return Answer(Outcome.DONE, f"{command.place} goes on")


def _give_up(command: Command, member: Member) -> Answer:
    if command.partition is None or command.offset is None:
        raise PenstockError("a message is named by its partition and its offset; name both")
    letters = member.give_up(_topic(command), command.partition, command.offset)
    return Answer(Outcome.DONE, f"{command.place} was given up: {letters} has it, and its key goes on")


def _stacks(_command: Command, member: Member) -> Answer:
    threads = sum(1 for _ in threading.enumerate())
    lines = [*_thread_stacks(), *_task_stacks(member.stacks())]
    return Answer(Outcome.DONE, f"the stacks of {threads} threads", "\n".join(lines)[:MOST_DETAILS])


def _not_of_members(command: Command, _member: Member) -> Answer:
    said = f"{command.name} is for a coordinator that hears commands, and this is a member of {command.group}"
    return Answer(Outcome.REFUSED, said)


def _operate(command: Command, store: StoreOperator) -> Answer:
    if command.transaction_id is None:
        raise PenstockError(f"{command.name} is for a member with handlers, and this is a coordinator")
    if command.name == "settle" and command.decision is not None:
        return Answer(*store.settle(command.transaction_id, command.decision, command.by, command.id))
    return Answer(Outcome.DONE, store.resume(command.transaction_id, command.by, command.id))


def _topic(command: Command) -> str:
    if command.topic is None:
        raise PenstockError(f"{command.name} is for a topic; name one")
    return command.topic


_DOING: Mapping[str, Callable[[Command, Member], Answer]] = {
    "pause": _pause,
    "resume": _resume,
    "give-up": _give_up,
    "stacks": _stacks,
}


def _thread_stacks() -> Iterator[str]:
    """Yield the stack of each thread, the call last: files, lines and functions. No values, and no text of the code."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to a stack
    # Ours first: what does not fit is cut.
    ours = sorted(frames, key=lambda ident: (not names.get(ident, "").startswith("penstock-"), names.get(ident, "")))
    for ident in ours:
        yield f"{names.get(ident, 'a thread without a name')}:"
        # `walk_stack` begins at the call that is last.
        walked = traceback.StackSummary.extract(
            traceback.walk_stack(frames[ident]), limit=_MOST_FRAMES, lookup_lines=False
        )
        yield from (f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(list(walked)))


def _task_stacks(stacks: Mapping[str, Any]) -> Iterator[str]:
    threads = {thread.name for thread in threading.enumerate()}
    for name, stack in stacks.items():
        if name in threads:
            continue
        yield f"{name}:"
        # Without the text of the code, which may hold anything.
        yield from (f"  {line.strip()}" for line in str(stack).splitlines() if line.startswith('  File "'))
