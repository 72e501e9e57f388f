"""The timeline of each guarantee, by the name of its page in `docs/guarantees`."""

from __future__ import annotations

from pictures.timeline import Timeline

TIMELINES = {
    "order-per-key": Timeline(
        "Two messages of one key, A1 and A2",
        [
            "A1 and A2 are put on the lane of A",
            "a worker takes the lane",
            "!handler(A1) returns",
            "!handler(A2) returns",
        ],
        [
            ("plain", "both come again, A1 first"),
            ("plain", "both come again, A1 first"),
            ("wait", "A1 may come again, then A2: 1 1 2"),
            ("wait", "1 2 may come again as 1 2; never 2 before 1"),
            ("done", "committed: neither comes again"),
        ],
    ),
    "nothing-lost": Timeline(
        "One message, from its fetch to its commit",
        ["fetched, registered in the tracker", "handler returns", "!the offset is done", "!commit of the watermark"],
        [
            ("plain", "fetched again"),
            ("plain", "handled again"),
            ("wait", "handled again: its effect comes twice"),
            ("wait", "handled again: its effect comes twice"),
            ("done", "never handled again"),
        ],
    ),
    "work-above-the-commit-point": Timeline(
        "Offset 103 waits for a retry; 104 to 111 are done meanwhile",
        [
            "103 fails: its key is parked",
            "104 to 111 are done",
            "!commit: 103, and the map of 104 to 111",
            "103 is done",
        ],
        [
            ("plain", "103 on is handled"),
            ("plain", "103 on is handled"),
            ("wait", "103 to 111 are handled again"),
            ("done", "only 103 is handled; 104 to 111 are left out"),
            ("done", "only 103, until the next commit"),
        ],
    ),
    "only-committed-once": Timeline(
        "One transactional message",
        ["half stored", "local transaction", "!decision stored", "!Kafka transaction: message, done, positions"],
        [
            ("plain", "nothing was sent"),
            ("wait", "a check finds no order: ROLLBACK"),
            ("wait", "a check finds the order: COMMIT"),
            ("done", "published; first an open Kafka transaction is ended"),
            ("done", "seen once; a successor reads that in the done log"),
        ],
    ),
    "exactly-once-results": Timeline(
        "One message whose handler returns a result, with exactly_once=True",
        ["handler returns", "results and position are written", "!commit is requested", "!committed"],
        [
            ("plain", "nothing is seen; handled again"),
            ("plain", "nothing is seen; handled again"),
            ("wait", "aborted: nothing is seen; handled again"),
            ("done", "all or nothing is seen; the group's offsets say which"),
            ("done", "seen once; not handled again"),
        ],
    ),
    "spark-rows-once": Timeline(
        "One micro-batch into a SqlSink",
        [
            "offsets planned, in Spark's log",
            "rows staged by executors",
            "!one SQL transaction: rows and ledger",
            "Spark's commit log",
        ],
        [
            ("plain", "planned again"),
            ("plain", "the batch comes again"),
            ("wait", "the batch comes again; the staging table is removed"),
            ("done", "the batch comes again; the ledger leaves it out"),
            ("done", "the next batch begins"),
        ],
    ),
    "the-group-keeps-its-member": Timeline(
        "A handler that takes ten minutes, and the poll thread",
        ["handler begins", "!the poll thread polls on; the partition pauses", "the watchdog logs the stack", "!done"],
        [
            ("plain", "fetched by a successor"),
            ("wait", "a successor has it after session.timeout.ms"),
            ("wait", "a successor has it after session.timeout.ms"),
            ("wait", "a successor has it after session.timeout.ms"),
            ("done", "committed: not handled again"),
        ],
    ),
}
