"""The runner: carries actions out on threads that may be left behind, each between two records of the audit.

What cannot be written to the audit beforehand is not done. An action that takes longer than its answer may is not
interrupted: its thread goes on, and tells the audit what came of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from penstock.errors import BrokerConnectionError, DecisionNotStoredError, PenstockError
from penstock.fleet.actions.action import Action, Asked, Result, Surroundings
from penstock.fleet.commands.audit import AuditRecord, Kind
from penstock.fleet.commands.audit_log import AuditWriter
from penstock.fleet.commands.fields import one_line
from penstock.fleet.commands.sender import CommandSender
from penstock.fleet_member import Outcome

_log = logging.getLogger(__name__)

#: Seconds that an answer may take, and threads at work.
ANSWER_S = 45.0
MOST_RUNNING = 8


class TooManyError(PenstockError):
    """As many actions are under way as may be."""


class ActionRunner:
    """Runs actions. For the thread of the event loop; what it starts are threads of their own.

    Args:
        around: what actions work with.
        answer_s: seconds that an answer may take.
    """

    def __init__(self, around: Surroundings, answer_s: float = ANSWER_S) -> None:
        self._around = around
        self._answer_s = answer_s
        # Guards the count, which threads lower when they end.
        self._lock = threading.Lock()
        self._running = 0

    async def plan(self, name: str, action: Action) -> Result:
        """Return what an action would do."""
        return await self._on_thread(name, lambda: _result(name, lambda: action.plan(self._around)))

    async def run(self, name: str, action: Action, parameters: Mapping[str, Any], by: str) -> tuple[str, Result]:
        """Carry an action out; return its id in the audit, and what came of it."""
        asked = Asked(secrets.token_hex(16), by, int(time.time() * 1000))
        return asked.id, await self._on_thread(name, lambda: self._audited(name, action, parameters, asked))

    def tell(self, name: str, by: str, said: str) -> None:
        """Have the audit told of something that was refused before it was an action; nobody waits for it."""

        def write() -> None:
            try:
                writer = AuditWriter(
                    self._around.bootstrap_servers, self._around.config, self._around.commands.with_token()
                )
                asked = Asked(secrets.token_hex(16), by, int(time.time() * 1000))
                writer.tell(_record(Kind.OUTCOME, name, {}, asked, Result(Outcome.REFUSED, said)))
            except PenstockError as error:
                _log.warning("the audit was not told: %s; it is: %s", one_line(str(error)), said)
            finally:
                self._one_less()

        with suppress(TooManyError):
            self._one_more()
            threading.Thread(target=write, name="penstock-audit", daemon=True).start()

    def _audited(self, name: str, action: Action, parameters: Mapping[str, Any], asked: Asked) -> Result:
        around = self._around
        try:
            with CommandSender(around.bootstrap_servers, around.config, around.commands) as sender:
                sender.audit.tell(_record(Kind.ASKED, name, parameters, asked, None), action.group)
                result = _result(name, lambda: action.run(around, asked, sender))
                _log.warning("%s, asked by %s (%s): %s", name, asked.by, asked.id, one_line(result.said))
                return self._told(sender, _record(Kind.OUTCOME, name, parameters, asked, result), action.group, result)
        except PenstockError as error:
            return Result(Outcome.FAILED, f"nothing was done, for it cannot be written to the audit: {error}")

    @staticmethod
    def _told(sender: CommandSender, record: AuditRecord, group: str, result: Result) -> Result:
        try:
            sender.audit.tell(record, group)
        except PenstockError as error:
            _log.warning("the outcome of %s is not in the audit: %s", record.id, error)
            return Result(result.outcome, f"{result.said}; the audit lacks this outcome: {error}", result.details)
        return result

    async def _on_thread(self, name: str, work: Callable[[], Result]) -> Result:
        """Do something on a thread of its own; FAILED where that takes too long."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result) -> None:
            if not ended.done():
                ended.set_result(result)

        def body() -> None:
            try:
                result = work()
            finally:
                self._one_less()
            # The loop may have ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result)

        self._one_more()
        threading.Thread(target=body, name=f"penstock-action-{name}", daemon=True).start()
        try:
            return await asyncio.wait_for(ended, self._answer_s)
        except TimeoutError:
            said = f"{name} did not end within {self._answer_s:g} s and goes on; the audit tells what came of it"
            return Result(Outcome.FAILED, said)

    def _one_more(self) -> None:
        with self._lock:
            if self._running >= MOST_RUNNING:
                raise TooManyError(f"{MOST_RUNNING} actions are under way; wait until one has ended")
            self._running += 1

    def _one_less(self) -> None:
        with self._lock:
            self._running -= 1


def _result(name: str, work: Callable[[], Result]) -> Result:
    """Do something; return what came of it, whatever it raised."""
    try:
        return work()
    except (BrokerConnectionError, DecisionNotStoredError) as error:
        # What was asked may have been done.
        return Result(Outcome.FAILED, str(error))
    except PenstockError as error:
        return Result(Outcome.REFUSED, str(error))
    except Exception as error:  # noqa: BLE001 - its text may be anything; the log is the dashboard's own
        _log.exception("%s failed", name)
        return Result(Outcome.FAILED, f"{name} failed with {type(error).__name__}; the dashboard's log says where")


def _record(kind: Kind, name: str, parameters: Mapping[str, Any], asked: Asked, result: Result | None) -> AuditRecord:
    return AuditRecord(
        kind=kind,
        id=asked.id,
        name=name,
        parameters=parameters,
        by=asked.by,
        host=socket.gethostname(),
        at_ms=int(time.time() * 1000),
        outcome=None if result is None else result.outcome,
        said="" if result is None else result.said,
        # Stacks are in the members' own answers.
        details=None,
    )
