"""A coordinator process, for tests that kill it.

Arguments: bootstrap servers, prefix, when to stand still so that the kill falls there, and an instance name or nothing.
It stands still `never`, `before commit` (all of the Kafka transaction is sent, except its end), `after commit` (it
ended, and the child does not know yet) or until it `thaw`s (as before commit; it goes on after it was frozen). Only
Kafka transactions that publish something stand still.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from penstock.clients.transactional.settings import Pace
from penstock.transactions import Coordinator
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.publishing.publisher import NotPublishedError, Publisher
from penstock.transactions.wire.ops import Verdict

#: Set when the process goes on after a freeze.
THAWED = threading.Event()


def stand_still(where: str) -> None:
    """Say where, and wait for the kill."""
    print(where, flush=True)  # noqa: T201 - the test reads it
    threading.Event().wait()


def main() -> None:
    servers, prefix, where, *instance = sys.argv[1:]
    commit, publish = Publisher._commit, Publisher.publish
    settling: set[Publisher] = set()

    def noting_publish(self: Publisher, batches: Mapping[int, CommitBatch], *rest: Any) -> Any:
        if any(pending.verdict is Verdict.COMMIT for batch in batches.values() for pending in batch.decided):
            settling.add(self)
        return publish(self, batches, *rest)

    def halting_commit(self: Publisher) -> None:
        if self not in settling:
            commit(self)
            return
        if where == "before commit":
            stand_still(where)
        if where == "thaw":
            print(where, flush=True)  # noqa: T201 - the test reads it
            THAWED.wait()
        try:
            commit(self)
        except NotPublishedError:
            print("refused", flush=True)  # noqa: T201 - the test reads it
            raise
        if where == "after commit":
            stand_still(where)

    # Nothing that stands still is given up, by it or by the broker, before a slow test has looked at it.
    Pace.limit = lambda _, well_s, *_times: max(well_s, 600.0)  # type: ignore[method-assign] # as below
    Publisher.publish = noting_publish  # type: ignore[method-assign] # as the fault below
    Publisher._commit = halting_commit  # type: ignore[method-assign] # the fault
    # How long it was frozen says nothing: a session may end three seconds later, or six.
    signal.signal(signal.SIGCONT, lambda *_: THAWED.set())
    named = instance[0] if instance else None
    with Coordinator(bootstrap_servers=servers, prefix=prefix, instance=named, session_timeout=6.0) as coordinator:
        print("started", flush=True)  # noqa: T201 - the test reads it
        # Not for ever: a signal that another thread was given is heard when this one looks up.
        while not coordinator.wait(0.1):
            pass


if __name__ == "__main__":
    main()
