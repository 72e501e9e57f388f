"""A coordinator process of a SQL store, for tests that kill it.

Arguments: bootstrap servers, prefix, the database's address, and when to stand still so that the kill falls there:
`never`, `before commit` (all of the Kafka transaction is sent, its end is not), `after commit` (it ended, and the
database does not know) or `after mark` (the database knows, the done log is not truncated).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection

from penstock.clients.transactional.settings import Pace
from penstock.transactions import Coordinator
from penstock.transactions.publishing.publisher import Publisher
from penstock.transactions.stores.sql.backlog import SqlBacklog
from penstock.transactions.stores.sql.store import SqlStore


def stand_still(where: str) -> None:
    """Say where, and wait for the kill."""
    print(where, flush=True)  # noqa: T201 - the test reads it
    threading.Event().wait()


def main() -> None:
    servers, prefix, url, where = sys.argv[1:]
    commit, published = Publisher._commit, SqlBacklog._write_published

    def halting_commit(self: Publisher) -> None:
        if where == "before commit":
            stand_still(where)
        commit(self)
        if where == "after commit":
            stand_still(where)

    def halting_published(self: SqlBacklog, names: Collection[str]) -> None:
        published(self, names)
        if names and where == "after mark":
            stand_still(where)

    # What stands still is not given up before the test has sent all.
    Pace.limit = lambda _, well_s, *_times: max(well_s, 600.0)  # type: ignore[method-assign] # as below
    Publisher._commit = halting_commit  # type: ignore[method-assign] # the fault
    SqlBacklog._write_published = halting_published  # type: ignore[method-assign] # the fault
    store = SqlStore(url, bootstrap_servers=servers, prefix=prefix, shards=1)
    coordinator = Coordinator(store=store, transaction_timeout=600.0, session_timeout=2.0).start()
    print("started", flush=True)  # noqa: T201 - the test reads it
    coordinator.wait()


if __name__ == "__main__":
    main()
