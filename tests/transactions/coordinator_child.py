"""A coordinator in a process of its own, for tests that kill it.

Arguments: bootstrap servers, prefix, and when to stand still so that the kill falls there: `never`, `before commit`
(all of the Kafka transaction is sent, its end is not) or `after commit` (it ended, and nobody here knows yet).
"""

from __future__ import annotations

import sys
import threading

from confluent_kafka import Producer

from penstock.transactions import Coordinator
from penstock.transactions.publisher import Publisher


def stand_still(where: str) -> None:
    """Say where, and wait for the kill."""
    print(where, flush=True)  # noqa: T201 - the test reads it
    threading.Event().wait()


def main() -> None:
    servers, prefix, where = sys.argv[1:]
    commit = Publisher._commit

    def halting_commit(self: Publisher, producer: Producer) -> None:
        if where == "before commit":
            producer.flush(10)
            stand_still(where)
        commit(self, producer)
        if where == "after commit":
            stand_still(where)

    Publisher._commit = halting_commit  # type: ignore[method-assign] # the fault
    with Coordinator(bootstrap_servers=servers, prefix=prefix) as coordinator:
        print("started", flush=True)  # noqa: T201 - the test reads it
        coordinator.wait()


if __name__ == "__main__":
    main()
