"""Carrying out a command in a member or a coordinator: what each name does, and the answer."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from traceback import format_stack

from penstock.errors import BrokerConnectionError, DecisionNotStoredError, NotGivenUpError, PenstockError
from penstock.fleet.commands.audit import MOST_DETAILS, Answer
from penstock.fleet.commands.command import ACTIONS, Command, Doer
from penstock.fleet_member import Member, Outcome, StoreOperator

_log = logging.getLogger(__name__)

#: Calls of a stack that are shown.
_MOST_FRAMES = 40


def answered(name: str, work: Callable[[], Answer]) -> Answer:
    """Do something for an action; return what came of it, whatever it raised."""
    try:
        return work()
    except (DecisionNotStoredError, BrokerConnectionError) as error:
        # What was asked may have been done.
        return Answer(Outcome.FAILED, str(error))
    except NotGivenUpError as error:
        return Answer(Outcome.SENT if error.is_under_way else Outcome.REFUSED, str(error))
    except PenstockError as error:
        return Answer(Outcome.REFUSED, str(error))
    except Exception as error:  # noqa: BLE001 - its text may be anything; the log is this process's own
        _log.exception("%s failed", name)
        return Answer(Outcome.FAILED, f"{name} failed with {type(error).__name__}; the log of who did it says where")


def carry_out(command: Command, doing: Member | StoreOperator) -> Answer:
    """Do what a command says; return what came of it, whatever that raises."""
    is_for_store = ACTIONS[command.name].doer is Doer.STORE
    if isinstance(doing, StoreOperator):
        if is_for_store:
            return answered(command.name, lambda: _operate(command, doing))
        said = f"{command.name} is for a member with handlers, and this is a coordinator"
    elif is_for_store:
        said = f"{command.name} is for a coordinator that hears commands, and this is a member of {command.group}"
    else:
        return answered(command.name, lambda: _handle(command, doing))
    return Answer(Outcome.REFUSED, said)


def _handle(command: Command, member: Member) -> Answer:
    topic, partition = command.parameters.get("topic", ""), command.parameters.get("partition")
    match command.name:
        case "pause":
            member.pause(topic, partition)
            said = f"{command.place} is paused: what was taken in is finished, and nothing more fetched"
        case "resume":
            member.resume(topic, partition)
            said = f"{command.place} goes on"
        case "give-up":
            letters = member.give_up(topic, command.parameters["partition"], command.parameters["offset"])
            said = f"{command.place} was given up: {letters} has it, and its key goes on"
        case _:
            stacks = "\n".join(_stacks(member.stacks()))[:MOST_DETAILS]
            return Answer(Outcome.DONE, f"the stacks of {threading.active_count()} threads", stacks)
    return Answer(Outcome.DONE, said)


def _operate(command: Command, store: StoreOperator) -> Answer:
    transaction_id = command.parameters["transaction_id"]
    if command.name == "settle":
        return Answer(*store.settle(transaction_id, command.parameters["decision"], command.by, command.id))
    return Answer(Outcome.DONE, store.resume(transaction_id, command.by, command.id))


def _stacks(of_tasks: Mapping[str, str]) -> Iterator[str]:
    """Yield the stack of each thread and task, the call last: files, lines, functions; no values, no text of code."""
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to a stack
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [(threads.get(it, "a thread without a name"), format_stack(frame)) for it, frame in frames.items()]
    # Ours first: what does not fit is cut.
    found.sort(key=lambda stack: (not stack[0].startswith("penstock-"), stack[0]))
    found += [(name, stack.splitlines()) for name, stack in of_tasks.items() if name not in threads.values()]
    for name, calls in found:
        yield f"{name}:"
        # The second line of a call is its code, which may hold anything.
        places = [call.splitlines()[0].strip() for call in calls if call.startswith('  File "')]
        yield from (f"  {place}" for place in places[-_MOST_FRAMES:])
