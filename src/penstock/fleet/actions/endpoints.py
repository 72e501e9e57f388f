"""The endpoint of actions: `POST /api/actions/{name}` performs one.

A request of another site's page, one that is no JSON, and one without the token are refused before the body is read.
The answer is one sentence. An action that exceeds the answer timeout is not interrupted: its thread goes on, and its
outcome is in the audit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import MessageFormatError, PenstockError
from penstock.fleet.actions.dispatch import ActionContext, perform, plan
from penstock.fleet.actions.tokens import TokenGuard
from penstock.fleet.commands.audit import Answer, AuditRecord, AuditWriter, Kind
from penstock.fleet.commands.command import ACTIONS, Command, command_of
from penstock.fleet.server import DisposableThreads, RefusedError, TooManyError, Visitors, json_answer, route
from penstock.fleet.wire import FLAG, parse_object, read_fields
from penstock.fleet_member import Outcome
from penstock.places import printable

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_log = logging.getLogger(__name__)

#: The size limit of a request's body in bytes, and its timeout in seconds.
_MOST_BODY = 16 << 10
_BODY_TIMEOUT_S = 10.0
#: The answer timeout in seconds, and the limit of actions at a time.
ANSWER_S = 45.0
MOST_RUNNING = 8
#: Seconds between two audit records about wrong tokens.
_LOG_INTERVAL_S = 60.0


def routes(context: ActionContext, token: str | None, visitors: Visitors | None = None) -> list[BaseRoute]:
    """Return the routes of actions, for a Starlette application.

    Args:
        context: the cluster of the actions.
        token: the token that requests must have; None: there are no actions.
        visitors: the rules for requests; left out, only requests to this machine's loopback address are answered.
    """
    visitors = visitors or Visitors(is_loopback=True)
    return [route("/api/actions/{name}", _Actions(context, token, visitors).act, visitors, "POST")]


class _Actions:
    """Answers requests on the thread of the event loop."""

    def __init__(self, context: ActionContext, token: str | None, visitors: Visitors) -> None:
        self._context = context
        self._visitors = visitors
        self._guard = None if token is None else TokenGuard(token)
        self._threads = DisposableThreads("penstock-action", "actions", MOST_RUNNING, ANSWER_S)
        self._audited_at = -_LOG_INTERVAL_S

    async def act(self, request: Request) -> Response:
        """Perform an action, or return what it would do."""
        name = request.path_params["name"]
        if name not in ACTIONS:
            raise RefusedError(404, f"there is no such action; there are {', '.join(ACTIONS)}")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "send an action as JSON: Content-Type: application/json")
        client = self._visitors.client(request)
        await self._require_token(request, client, name)
        body = await _body(request)
        try:
            arguments = parse_object(body, _MOST_BODY)
            is_dry = read_fields(arguments, {"dry_run": FLAG.or_none}).get("dry_run", False)
            arguments.pop("dry_run", None)
            command = command_of(name, arguments, f"{client} by the dashboard", int(time.time() * 1000))
        except MessageFormatError as error:
            raise RefusedError(422, f"{name}: {error}") from error
        try:
            answer = await self._threads.run(partial(plan if is_dry else _perform, command, self._context))
        except TimeoutError:
            said = f"{name} did not end within {ANSWER_S:g} s and goes on; see its outcome in the audit"
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
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        delay_s = self._guard.judge(client, credentials.strip() if scheme.lower() == "bearer" else "")
        if delay_s is None:
            raise RefusedError(429, "too many wrong tokens from here; try again later")
        if delay_s == 0:
            return
        now = time.monotonic()
        if now - self._audited_at >= _LOG_INTERVAL_S:
            self._audited_at = now
            said = f"a wrong token from {client}; {self._guard.wrong} in total from all addresses"
            _log.warning("%s", said)
            with suppress(TooManyError):  # the answer does not wait for the audit
                self._threads.start(partial(self._audit_refusal, Command(name, "", by=client), said))
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._guard.answered(client)
        raise RefusedError(401, "the token is wrong: send Authorization: Bearer TOKEN")

    def _audit_refusal(self, command: Command, said: str) -> None:
        """Write to the audit that a request with a wrong token was refused."""
        context = self._context
        try:
            writer = AuditWriter(context.bootstrap_servers, context.config, context.commands.with_token())
            record = AuditRecord.of(Kind.OUTCOME, command, command.by, Answer(Outcome.REFUSED, said))
            writer.append(record, command.key)
        except PenstockError as error:
            _log.warning("the audit lacks a record: %s; it would be: %s", printable(str(error)), said)


def _perform(command: Command, context: ActionContext) -> Answer:
    answer = perform(command, context)
    _log.warning("%s, asked by %s (%s): %s", command.name, command.by, command.id, printable(answer.said))
    return answer


async def _body(request: Request) -> bytes:
    parts = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                parts += part
                if len(parts) > _MOST_BODY:
                    raise RefusedError(413, f"the body of an action has {_MOST_BODY} bytes at most")
    except TimeoutError:
        raise RefusedError(408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
    return bytes(parts)
