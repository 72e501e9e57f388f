"""The endpoints of actions: `GET /api/actions` names them, `POST /api/actions/{name}` carries one out.

A request that changes something comes from a page of this address, as JSON, with the token; everything else is refused
before it is read. An answer is one sentence of what was done, to what. An action that takes longer than its answer may
is not interrupted: its thread goes on, and the audit has what came of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import MessageFormatError, PenstockError
from penstock.fleet.actions.performing import Surroundings, perform, plan
from penstock.fleet.actions.tokens import TokenGuard
from penstock.fleet.commands.audit import Answer, AuditRecord, Kind
from penstock.fleet.commands.audit_log import AuditWriter
from penstock.fleet.commands.command import ACTIONS, Command, command_of
from penstock.fleet.disposable_threads import DisposableThreads, TooManyError
from penstock.fleet.server import HEADERS
from penstock.fleet.visitors import Visitors
from penstock.fleet.wire import FLAG, loaded_object, one_line, taken
from penstock.fleet_member import Outcome

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_log = logging.getLogger(__name__)

#: Bytes of a request's body, and seconds in which it must come.
_MOST_BODY = 16 << 10
_BODY_TIMEOUT_S = 10.0
#: Seconds that an answer may take, and actions at work.
ANSWER_S = 45.0
MOST_RUNNING = 8
#: Seconds between two records of the audit that tell of wrong tokens.
_LOG_AGAIN_S = 60.0
_STATUS = {Outcome.REFUSED: 409}


def routes(around: Surroundings, token: str | None, visitors: Visitors | None = None) -> list[Route]:
    """Return the routes of actions, for a Starlette application.

    Args:
        around: what they work with.
        token: what a request must show; None: there are no actions.
        visitors: whose requests are answered; those of this machine alone when left out.
    """
    from starlette.routing import Route

    endpoints = _ActionEndpoints(around, token, visitors or Visitors(is_loopback=True))
    return [
        Route("/api/actions", endpoints.names, methods=["GET"]),
        Route("/api/actions/{name}", endpoints.act, methods=["POST"]),
    ]


class _RefusedError(Exception):
    """A request is answered with this status and sentence."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class _ActionEndpoints:
    """Answers requests on the thread of the event loop."""

    def __init__(self, around: Surroundings, token: str | None, visitors: Visitors) -> None:
        self._around = around
        self._visitors = visitors
        self._guard = None if token is None else TokenGuard(token)
        self._threads = DisposableThreads("penstock-action", MOST_RUNNING, ANSWER_S)
        self._told_at = -_LOG_AGAIN_S

    async def names(self, request: Request) -> Response:
        """Answer which actions there are."""
        try:
            self._require_own_page(request)
        except _RefusedError as refused:
            return _answer(refused.status, {"said": str(refused)})
        is_enabled = self._guard is not None
        return _answer(200, {"enabled": is_enabled, "actions": list(ACTIONS) if is_enabled else []})

    async def act(self, request: Request) -> Response:
        """Carry out an action, or say what it would do."""
        try:
            return await self._act(request)
        except _RefusedError as refused:
            return _answer(refused.status, {"said": str(refused)})
        except TooManyError as error:
            return _answer(503, {"said": str(error)})

    async def _act(self, request: Request) -> Response:
        self._require_own_page(request)
        name = request.path_params["name"]
        if name not in ACTIONS:
            raise _RefusedError(404, f"there is no such action; there are {', '.join(ACTIONS)}")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise _RefusedError(415, "an action is asked for as JSON: Content-Type: application/json")
        client = self._visitors.client(request)
        await self._require_token(request, client, name)
        body = await _body(request)
        try:
            given = loaded_object(body, _MOST_BODY)
            is_dry = taken(given, {"dry_run": FLAG.or_none}).get("dry_run", False)
            given.pop("dry_run", None)
            command = command_of(name, given, f"{client} by the dashboard", int(time.time() * 1000))
        except MessageFormatError as error:
            raise _RefusedError(422, f"{name}: {error}") from error
        answer = await self._answered(name, partial(plan if is_dry else perform, command, self._around))
        head = {} if is_dry else {"id": command.id}
        details = {} if answer.details is None else {"details": answer.details}
        shown = {**head, "outcome": answer.outcome.value, "said": answer.said, **details}
        return _answer(_STATUS.get(answer.outcome, 200), shown)

    async def _answered(self, name: str, work: partial[Answer]) -> Answer:
        try:
            return await self._threads.run(work)
        except TimeoutError:
            said = f"{name} did not end within {self._threads.limit_s:g} s and goes on; the audit has what came of it"
            return Answer(Outcome.FAILED, said)

    def _require_own_page(self, request: Request) -> None:
        """Refuse requests that a page of another site makes in somebody's browser."""
        if not self._visitors.may_read(request):
            raise _RefusedError(403, "this address is for this machine alone")
        if not self._visitors.is_own_page(request):
            raise _RefusedError(
                403,
                "a page of another site asks for this; open the dashboard itself, and behind a proxy start it with "
                "--public-url",
            )

    async def _require_token(self, request: Request, client: str, name: str) -> None:
        if self._guard is None:
            raise _RefusedError(
                403, "actions are off; start the dashboard with PENSTOCK_DASHBOARD_TOKEN or --token-file to have them"
            )
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        delay_s = self._guard.judge(client, given.strip() if scheme.lower() == "bearer" else "")
        if delay_s is None:
            raise _RefusedError(429, "too many wrong tokens from here; try again later")
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
        raise _RefusedError(401, "the token is wrong: send Authorization: Bearer TOKEN")

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
                    raise _RefusedError(413, f"the body of an action has {_MOST_BODY} bytes at most")
    except TimeoutError:
        raise _RefusedError(408, f"the body did not come within {_BODY_TIMEOUT_S:g} s") from None
    return bytes(parts)


def _answer(status: int, body: dict[str, Any]) -> Response:
    from starlette.responses import Response

    # Escaped further than JSON asks for: it is harmless also where somebody puts it into a page as it is.
    text = json.dumps(body).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Response(text + "\n", status, {**HEADERS, "Content-Type": "application/json"})
