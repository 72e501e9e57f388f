"""The main paths of `penstock run`, `penstock coordinator` and `penstock doctor`; `roles` has those of the library.

Settings are in the environment, as an operator gives them: a command line is seen by all who are on the machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from roles import letters
from roles_of_transactions import send, transactional
from world import STEP_S, World

from canary import PASSWORD, processes_that_show
from waiting import wait_until

APP = """
import json, os
import penstock

app = penstock.App(
    os.environ["APP"],
    bootstrap_servers=os.environ["PENSTOCK_BOOTSTRAP_SERVERS"],
    config=json.loads(os.environ["PENSTOCK_CONFIG"]),
)

@app.handler(os.environ["TOPIC"], retry=penstock.retry(attempts=1), retry_delays=[0.1], on_failure="dead_letter")
def fail(message):
    raise ValueError(f"no good: {message.value!r}")
"""


@contextmanager
def running(world: World, *arguments: str) -> Iterator[None]:
    """Run `penstock ARGUMENTS...` as a process of the user's, which ends in order with the block.

    What it prints is this test's output, which is searched for canaries.
    """
    settings = {
        "PENSTOCK_BOOTSTRAP_SERVERS": world.servers,
        "PENSTOCK_CONFIG": json.dumps(dict(world.config)),
        "APP": world.names["app"],
        "TOPIC": world.names["topic"],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments], cwd=world.folder, env={**os.environ, **settings}
    )
    try:
        yield
        assert processes_that_show(PASSWORD) == []
        process.terminate()
        assert process.wait(STEP_S) == 0
    finally:
        process.kill()
        process.wait()


def run(world: World) -> None:
    """Have an app make a dead letter of a message, after a retry."""
    (world.folder / "shop.py").write_text(APP)
    world.write()
    with running(world, "run", "shop:app"):
        wait_until(lambda: letters(world) == 1, STEP_S)


def coordinator(world: World) -> None:
    administrator = world.as_administrator()
    with (
        running(world, "coordinator", "--prefix", world.names["prefix"]),
        transactional(administrator) as sending,
    ):
        send(administrator, sending)
    world.require_all_once(world.names["topic"])


def doctor(world: World) -> None:
    assert f"broker at {world.servers}  answers" in re.sub(r" {2,}", "  ", world.run("doctor"))
