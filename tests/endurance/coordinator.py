"""A coordinator process of the endurance campaign: it settles the transactions of the stores in Kafka and in SQL."""

from __future__ import annotations

import sys

from child import begin, options, stopping

from penstock.transactions import Coordinator, SqlStore

#: Undecided transactions are asked about soon, and as often as it takes: a sender may be away for long.
CHECKS = {"transaction_timeout": 3.0, "check_interval": 3.0, "check_max": 10_000, "session_timeout": 6.0}
_LOOK_S = 0.2

if __name__ == "__main__":
    begin()
    servers, config = options["bootstrap_servers"], options["config"]
    store = SqlStore(options["sqlalchemy"], bootstrap_servers=servers, prefix="sql", config=config)
    in_kafka = Coordinator(bootstrap_servers=servers, prefix="kafka", instance=options["role"], config=config, **CHECKS)
    with in_kafka, Coordinator(store=store, **CHECKS) as in_sql:
        while not stopping.is_set():
            if in_kafka.wait(_LOOK_S) or in_sql.wait(0):
                sys.exit("a coordinator ended by itself")
