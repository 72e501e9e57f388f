"""Requests to any server of the fleet, and a server of actions."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from penstock.fleet import Address, AppEndpoints
from penstock.fleet.actions.dispatch import ActionContext
from penstock.fleet.actions.endpoints import routes
from penstock.fleet.server import Visitors, serving

TOKEN, OF_COMMANDS = "right" * 5, "right" * 6


class Answer(NamedTuple):
    """An answer of a server; header names are in small letters."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def content(self) -> Any:
        """What its JSON holds."""
        return json.loads(self.text)


def request(address: object, path: str, body: object = None, **headers: str) -> Answer:
    """Return the answer of an address; a body is posted, as JSON unless it is bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(str(address).removeprefix("http://"), timeout=100)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("GET" if data is None else "POST", path, data, given)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read().decode())
    finally:
        connection.close()


@contextmanager
def served(around: ActionContext, token: str | None = TOKEN, visitors: Visitors | None = None) -> Iterator[str]:
    """Serve the routes of actions; the block gets the address."""
    with Address("127.0.0.1", 0).listen() as listener, serving(listener, routes(around, token, visitors)):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def act(address: str, name: str, token: str = TOKEN, **parameters: object) -> tuple[int, dict[str, Any]]:
    """Ask for an action; return the status and the body."""
    to = f"/api/actions/{name}"
    answer = request(address, to, parameters, Authorization=f"Bearer {token}", Content_Type="application/json")
    return answer.status, answer.content


def reasons(endpoints: AppEndpoints, path: str) -> str:
    """Return why a process does not live or is not ready, and nothing where all is well."""
    answer = request(endpoints.address, path)
    assert answer.status == (503 if answer.content["reasons"] else 200)
    return "; ".join(answer.content["reasons"])
