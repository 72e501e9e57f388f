"""Executes a command in a member or a coordinator, and makes the answer."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from traceback import format_stack

from penstock.errors import BrokerConnectionError, DecisionNotStoredError, NotGivenUpError, PenstockError
from penstock.fleet.commands.audit import MOST_DETAILS, Answer
from penstock.fleet.commands.command import ACTIONS, Command, Executor
from penstock.fleet_member import Member, Outcome, StoreOperator

_log = logging.getLogger(__name__)

#: The limit of calls shown of a stack.
_MOST_FRAMES = 40


def answer_of(name: str, work: Callable[[], Answer]) -> Answer:
    """Run the work of an action; return its answer, or the answer that its exception means."""
    try:
        return work()
    except (DecisionNotStoredError, BrokerConnectionError) as error:
        # The action may have happened.
        return Answer(Outcome.FAILED, str(error))
    except NotGivenUpError as error:
        return Answer(Outcome.SENT if error.is_under_way else Outcome.REFUSED, str(error))
    except PenstockError as error:
        return Answer(Outcome.REFUSED, str(error))
    except Exception as error:  # noqa: BLE001 - its text may hold payloads; only this process's own log gets it
        _log.exception("%s failed", name)
        return Answer(
            Outcome.FAILED, f"{name} failed with {type(error).__name__}; see the log of the process that ran it"
        )


def execute(command: Command, target: Member | StoreOperator) -> Answer:
    """Execute a command; return the answer, also if it raised."""
    is_for_store = ACTIONS[command.name].executor is Executor.STORE
    if isinstance(target, StoreOperator):
        if is_for_store:
            return answer_of(command.name, lambda: _operate(command, target))
        said = f"{command.name} is for a member with handlers, and this is a coordinator"
    elif is_for_store:
        said = f"{command.name} is for a coordinator that hears commands, and this is a member of {command.group}"
    else:
        return answer_of(command.name, lambda: _handle(command, target))
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
            dead_letter_topic = member.give_up(topic, command.parameters["partition"], command.parameters["offset"])
            said = f"{command.place} was given up: {dead_letter_topic} has it, and its key goes on"
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
    """Yield the stack of each thread and task, the innermost call last: files, lines, functions; no values, no code."""
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to a stack
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [(threads.get(ident, "a thread without a name"), format_stack(frame)) for ident, frame in frames.items()]
    # Our own threads first: the end of a long text is cut.
    found.sort(key=lambda stack: (not stack[0].startswith("penstock-"), stack[0]))
    found += [(name, stack.splitlines()) for name, stack in of_tasks.items() if name not in threads.values()]
    for name, calls in found:
        yield f"{name}:"
        # The second line of a call is source code, which may hold secrets.
        places = [call.splitlines()[0].strip() for call in calls if call.startswith('  File "')]
        yield from (f"  {place}" for place in places[-_MOST_FRAMES:])
