"""A sender of the endurance campaign, on one store: transactions whose truth is a table of PostgreSQL.

A local transaction inserts a row into `sent` and passes the barrier, in one SQL transaction: the messages shall be
visible if, and only if, the row is there. Half of the threads use `order="half"`, the others `order="commit"` with
delays. Each key belongs to one thread of one process, and its messages are numbered in the order of their sends.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
from child import begin, connect, options, stopping, write_down
from coordinator import CHECKS

import penstock
from penstock import PenstockError
from penstock.transactions import Coordinator, FileStore, SqlStore, barrier, barrier_check

KEYS_EACH = 5
#: Bytes of a value: more than a topic takes while it refuses.
_PADDING = "x" * 300
_LONGEST_DELAY_S = 5.0


class RolledBackError(Exception):
    """Rolls a local transaction back."""


def is_quiet() -> bool:
    """Return whether sending shall end."""
    return stopping.is_set() or (Path(options["folder"]) / "quiet").exists()


class Sending(threading.Thread):
    """A thread that sends transactions one after the other, until all is quiet."""

    def __init__(self, producer: penstock.TransactionalProducer, name: str, *, delays: bool) -> None:
        super().__init__(name=name, daemon=True)
        self._producer, self._delays = producer, delays
        self._chance = random.Random(f"{options['seed']} {name}")  # noqa: S311 - no secret
        self._connection: psycopg.Connection | None = None

    def run(self) -> None:
        """Send at the rate that the campaign asks for."""
        at, number = time.monotonic(), 0
        while not is_quiet():
            at = max(at + options["pause"], time.monotonic() - 1.0)
            # The rate is part of the campaign.
            stopping.wait(max(0.0, at - time.monotonic()))
            number += 1
            outcome = self._send(f"{self.name}.{number}", f"{self.name}.{number % KEYS_EACH}", number)
            write_down(("sent", time.monotonic(), *outcome))

    def _send(self, name: str, key: str, number: int) -> tuple[str, int]:
        chance = self._chance
        parts = 3 if chance.random() < 0.25 else 1
        # By the machine's clock: what this process's clock says may be an hour off.
        due_s = time.clock_gettime(time.CLOCK_REALTIME) + chance.uniform(0, _LONGEST_DELAY_S)
        due_s = due_s if self._delays and chance.random() < 0.3 else None
        value = {"id": name, "of": parts, "number": number, "due": due_s, "padding": _PADDING}
        store = options["store"]
        messages = [
            penstock.Outgoing(
                f"{store}-second" if part == 2 else f"{store}-target", json.dumps(value | {"part": part}), key
            )
            for part in range(parts)
        ]
        try:
            with self._producer.transaction_of(messages, deliver_at=due_s) as tx:
                draw = chance.random()
                if draw < 0.2:
                    raise RolledBackError  # noqa: TRY301 - as a user's code would
                self._local_transaction(tx, name, parts, due_s, fails=draw < 0.3)
                if draw > 0.97:
                    tx.unknown()
        except RolledBackError:
            return "rolled back", parts
        except (PenstockError, psycopg.Error) as error:
            return type(error).__name__, parts
        return "committed", parts

    def _local_transaction(self, tx: Any, name: str, parts: int, due_s: float | None, *, fails: bool) -> None:
        """Insert a row, behind the barrier; a connection that failed is not used again."""
        try:
            connection = self._connection = self._connection or connect()
            barrier(connection, tx)
            connection.execute("INSERT INTO sent VALUES (%s, %s, %s, %s)", (options["store"], name, parts, due_s))
            if fails:
                raise RolledBackError  # noqa: TRY301 - as above
            connection.commit()
        except RolledBackError:
            connection.rollback()
            raise
        except BaseException:
            broken, self._connection = self._connection, None
            if broken is not None:
                with contextlib.suppress(psycopg.Error):
                    broken.close()
            raise


def place() -> dict[str, Any]:
    """Return the arguments of a producer that name its store."""
    servers, config, store = options["bootstrap_servers"], options["config"], options["store"]
    if store == "kafka":
        return {"bootstrap_servers": servers, "prefix": "kafka", "config": config}
    if store == "sql":
        return {"store": SqlStore(options["sqlalchemy"], bootstrap_servers=servers, prefix="sql", config=config)}
    folder = f"{options['folder']}/file-store"
    more = {"config": config, "segment_bytes": options["segment_bytes"]}
    return {"store": FileStore(folder, bootstrap_servers=servers, prefix="file", **more)}


def main() -> None:
    """Send until all is quiet, and answer checks until SIGTERM. A file store has its coordinator here."""
    begin()
    where, check = place(), barrier_check(connect)
    with contextlib.ExitStack() as opened:
        if options["store"] == "file":
            opened.enter_context(Coordinator(store=where["store"], **CHECKS))
        threads: list[Sending] = []
        for order in ("half", "commit"):
            producer = opened.enter_context(
                penstock.TransactionalProducer(f"{options['store']}-{order}", order=order, check=check, **where)
            )
            for number in range(options["threads"]):
                name = f"{options['store']}.{options['instance']}.{order}.{number}"
                threads.append(Sending(producer, name, delays=order == "commit"))
        for thread in threads:
            thread.start()
        stopping.wait()
        for thread in threads:
            thread.join(30)


main()
os._exit(0)  # a thread that a slow broker holds is abandoned
