"""A server of actions, and requests to it."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from penstock.fleet.actions import Surroundings, routes
from penstock.fleet.visitors import Visitors
from waiting import wait_until

TOKEN, OF_COMMANDS = "right" * 5, "right" * 6


@contextmanager
def served(around: Surroundings, token: str | None = TOKEN, visitors: Visitors | None = None) -> Iterator[str]:
    """Serve the routes of actions; the block gets the address."""
    app = Starlette(routes=routes(around, token, visitors))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, 60)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def request(address: str, path: str, body: object = None, **headers: str) -> tuple[int, dict[str, Any]]:
    """Return the status and what was answered; a body is posted, as JSON unless it is bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = urllib.request.Request(f"{address}{path}", data, given)  # noqa: S310 - this machine's
    try:
        with urllib.request.urlopen(asked, timeout=100) as answer:  # noqa: S310 - as above
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def act(address: str, name: str, token: str = TOKEN, **parameters: object) -> tuple[int, dict[str, Any]]:
    return request(
        address, f"/api/actions/{name}", parameters, Authorization=f"Bearer {token}", Content_Type="application/json"
    )
