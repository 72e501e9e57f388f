"""The endpoints of actions: `GET /api/actions` names them, `POST /api/actions/{name}` carries one out.

A request that changes something comes from a page of this address, as JSON, with the token; everything else is refused
before it is read. An answer is one sentence of what was done, to what.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.fleet.actions import of_kafka, of_members, of_stores
from penstock.fleet.actions.action import MakeAction, Members, Result, Surroundings
from penstock.fleet.actions.parameters import ParameterError, Parameters
from penstock.fleet.actions.runner import ActionRunner, TooManyError
from penstock.fleet.actions.tokens import Judgement, TokenGuard
from penstock.fleet.commands.sender import ANSWER_S
from penstock.fleet.visitors import Visitors
from penstock.fleet_member import CommandSettings, Outcome
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_log = logging.getLogger(__name__)

_ACTIONS: dict[str, MakeAction] = {
    "pause": of_members.pause,
    "resume": of_members.resume,
    "stacks": of_members.stacks,
    "give-up": of_members.give_up,
    "offsets": of_kafka.offsets,
    "replay": of_kafka.replay,
    "settle": of_stores.settle,
    "resume-transaction": of_stores.resume_transaction,
}

#: Bytes of a request's body, and seconds in which it must come.
_MOST_BODY = 16 << 10
_BODY_S = 10.0
#: Seconds between two records of the audit that tell of wrong tokens.
_TELL_AGAIN_S = 60.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STATUS = {Outcome.REFUSED: 409}


def _nobody(_group: str) -> Collection[str]:
    return ()


@dataclass(frozen=True, slots=True)
class ActionSettings:
    """What the endpoints of actions work with.

    Attributes:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        token: what a request must show; None: there are no actions.
        commands: the topics of commands and of the audit.
        visitors: whose requests are answered.
        members: returns which members of a group listen to commands, as far as that is known; any thread.
        answer_timeout: seconds that members have for an answer.
    """

    bootstrap_servers: str
    config: ClientConfig = field(default_factory=dict, repr=False)
    token: str | None = field(default=None, repr=False)
    commands: CommandSettings = field(default_factory=CommandSettings)
    visitors: Visitors = field(default_factory=lambda: Visitors(is_loopback=True))
    members: Members = _nobody
    answer_timeout: float = ANSWER_S


def routes(settings: ActionSettings) -> list[Route]:
    """Return the routes of actions, for a Starlette application."""
    from starlette.routing import Route

    endpoints = _ActionEndpoints(settings)
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

    def __init__(self, settings: ActionSettings) -> None:
        self._visitors = settings.visitors
        self._guard = None if settings.token is None else TokenGuard(settings.token)
        reached = (settings.bootstrap_servers, settings.config, settings.commands)
        self._runner = ActionRunner(Surroundings(*reached, settings.members, settings.answer_timeout))
        self._told_at = -_TELL_AGAIN_S

    async def names(self, request: Request) -> Response:
        """Answer which actions there are."""
        try:
            self._require_own_page(request)
        except _RefusedError as refused:
            return _answer(refused.status, {"said": str(refused)})
        is_enabled = self._guard is not None
        return _answer(200, {"enabled": is_enabled, "actions": list(_ACTIONS) if is_enabled else []})

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
        make = _ACTIONS.get(name)
        if make is None:
            raise _RefusedError(404, f"there is no such action; there are {', '.join(_ACTIONS)}")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise _RefusedError(415, "an action is asked for as JSON: Content-Type: application/json")
        client = self._visitors.client(request)
        await self._require_token(request, client, name)
        body = await _body(request)
        try:
            parameters = Parameters(body)
            is_dry = parameters.flag("dry_run")
            parameters.told.clear()
            action = make(parameters)
            parameters.end()
        except ParameterError as error:
            raise _RefusedError(422, f"{name}: {error}") from error
        if is_dry:
            return _result_answer(await self._runner.plan(name, action), {})
        by = f"{client} by the dashboard"
        identity, result = await self._runner.run(name, action, parameters.told, by)
        return _result_answer(result, {"id": identity})

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
        judgement, delay_s = self._guard.judge(client, given.strip() if scheme.lower() == "bearer" else "")
        if judgement is Judgement.RIGHT:
            return
        if judgement is Judgement.UNREAD:
            raise _RefusedError(429, "too many wrong tokens from here; try again later")
        now = time.monotonic()
        if now - self._told_at >= _TELL_AGAIN_S:
            self._told_at = now
            said = f"a wrong token from {client}; {self._guard.wrong} so far from anywhere"
            _log.warning("%s", said)
            self._runner.tell(name, client, said)
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._guard.answered(client)
        raise _RefusedError(401, "the token is wrong: send Authorization: Bearer TOKEN")


async def _body(request: Request) -> dict[str, Any]:
    """Return the object that a request holds."""
    parts = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                parts += part
                if len(parts) > _MOST_BODY:
                    raise _RefusedError(413, f"the body of an action has {_MOST_BODY} bytes at most")
    except TimeoutError:
        raise _RefusedError(408, f"the body did not come within {_BODY_S:g} s") from None
    try:
        found = json.loads(bytes(parts), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise _RefusedError(422, "the body is no JSON") from None
    if not isinstance(found, dict):
        raise _RefusedError(422, "the body is no JSON object of parameters")
    return found


def _no_number(text: str) -> None:
    raise ValueError(text)


def _result_answer(result: Result, head: dict[str, Any]) -> Response:
    body = {**head, "outcome": result.outcome.value, "said": result.said}
    if result.details is not None:
        body["details"] = result.details
    return _answer(_STATUS.get(result.outcome, 200), body)


def _answer(status: int, body: dict[str, Any]) -> Response:
    from starlette.responses import Response

    # Escaped further than JSON asks for: it is harmless also where somebody puts it into a page as it is.
    text = json.dumps(body).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Response(text + "\n", status, {**_HEADERS, "Content-Type": "application/json"})
