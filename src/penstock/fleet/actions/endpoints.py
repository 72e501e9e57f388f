"""The endpoint of actions: `POST /api/actions/{name}` carries one out.

A request comes from a page of this address, as JSON, with the token; everything else is refused before it is read. An
answer is one sentence of what was done, to what. An action that takes longer than its answer may is not interrupted:
its thread goes on, and the audit has what came of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import MessageFormatError, PenstockError
from penstock.fleet.actions.performing import Surroundings, perform, plan
from penstock.fleet.actions.tokens import TokenGuard
from penstock.fleet.commands.audit import Answer, AuditRecord, AuditWriter, Kind
from penstock.fleet.commands.command import ACTIONS, Command, command_of
from penstock.fleet.server import DisposableThreads, RefusedError, TooManyError, Visitors, json_answer, route
from penstock.fleet.wire import FLAG, loaded_object, one_line, taken
from penstock.fleet_member import Outcome

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_log = logging.getLogger(__name__)

#: Bytes of a request's body, and seconds in which it must come.
_MOST_BODY = 16 << 10
_BODY_TIMEOUT_S = 10.0
#: Seconds that an answer may take, and actions at work.
ANSWER_S = 45.0
MOST_RUNNING = 8
#: Seconds between two records of the audit that tell of wrong tokens.
_LOG_AGAIN_S = 60.0


def routes(around: Surroundings, token: str | None, visitors: Visitors | None = None) -> list[BaseRoute]:
    """Return the routes of actions, for a Starlette application.

    Args:
        around: what they work with.
        token: what a request must show; None: there are no actions.
        visitors: whose requests are answered; those of this machine alone when left out.
    """
    visitors = visitors or Visitors(is_loopback=True)
    return [route("/api/actions/{name}", _Actions(around, token, visitors).act, visitors, "POST")]


class _Actions:
    """Answers requests on the thread of the event loop."""

    def __init__(self, around: Surroundings, token: str | None, visitors: Visitors) -> None:
        self._around = around
        self._visitors = visitors
        self._guard = None if token is None else TokenGuard(token)
        self._threads = DisposableThreads("penstock-action", "actions", MOST_RUNNING, ANSWER_S)
        self._told_at = -_LOG_AGAIN_S

    async def act(self, request: Request) -> Response:
        """Carry out an action, or say what it would do."""
        name = request.path_params["name"]
        if name not in ACTIONS:
            raise RefusedError(404, f"there is no such action; there are {', '.join(ACTIONS)}")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "an action is asked for as JSON: Content-Type: application/json")
        client = self._visitors.client(request)
        await self._require_token(request, client, name)
        body = await _body(request)
        try:
            given = loaded_object(body, _MOST_BODY)
            is_dry = taken(given, {"dry_run": FLAG.or_none}).get("dry_run", False)
            given.pop("dry_run", None)
            command = command_of(name, given, f"{client} by the dashboard", int(time.time() * 1000))
        except MessageFormatError as error:
            raise RefusedError(422, f"{name}: {error}") from error
        try:
            answer = await self._threads.run(partial(plan if is_dry else perform, command, self._around))
        except TimeoutError:
            said = f"{name} did not end within {ANSWER_S:g} s and goes on; the audit has what came of it"
            answer = Answer(Outcome.FAILED, said)
        head = {} if is_dry else {"id": command.id}
        details = {} if answer.details is None else {"details": answer.details}
        shown = {**head, "outcome": answer.outcome.value, "said": answer.said, **details}
        return json_answer(shown, 409 if answer.outcome is Outcome.REFUSED else 200)

    async def _require_token(self, request: Request, client: str, name: str) -> None:
        if self._guard is None:
            raise RefusedError(
                403, "actions are off; start the dashboard with PENSTOCK_DASHBOARD_TOKEN or --token-file to have them"
            )
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        delay_s = self._guard.judge(client, given.strip() if scheme.lower() == "bearer" else "")
        if delay_s is None:
            raise RefusedError(429, "too many wrong tokens from here; try again later")
        if delay_s == 0:
            return
        now = time.monotonic()
        if now - self._told_at >= _LOG_AGAIN_S:
            self._told_at = now
            said = f"a wrong token from {client}; {self._guard.wrong} so far from anywhere"
            _log.warning("%s", said)
            with suppress(TooManyError):  # nobody waits for the audit
                self._threads.start(partial(self._tell, Command(name, "", by=client), said))
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._guard.answered(client)
        raise RefusedError(401, "the token is wrong: send Authorization: Bearer TOKEN")

    def _tell(self, command: Command, said: str) -> None:
        """Write into the audit that something was refused before it was an action."""
        around = self._around
        try:
            writer = AuditWriter(around.bootstrap_servers, around.config, around.commands.with_token())
            writer.tell(AuditRecord.of(Kind.OUTCOME, command, command.by, Answer(Outcome.REFUSED, said)))
        except PenstockError as error:
            _log.warning("nothing was written into the audit: %s; it would be: %s", one_line(str(error)), said)


async def _body(request: Request) -> bytes:
    parts = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                parts += part
                if len(parts) > _MOST_BODY:
                    raise RefusedError(413, f"the body of an action has {_MOST_BODY} bytes at most")
    except TimeoutError:
        raise RefusedError(408, f"the body did not come within {_BODY_TIMEOUT_S:g} s") from None
    return bytes(parts)
