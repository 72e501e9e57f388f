"""Writes docs/endurance.md from the results of campaigns: nothing in it that did not run."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

#: The results of all campaigns, a line of JSON each.
RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "endurance.md"

_TEXT = """\
# Endurance

*Written by `make endurance ARGS=--report` from `tests/endurance/results.jsonl`; do not edit it by hand.*

Campaigns run everything that penstock has on three Kafka nodes, harm it for minutes, several faults at once, and judge
the histories by a checker that imports nothing of penstock.

{summary}

## What runs

- **Two workers** in two processes, one app with `exactly_once=True`: an `async def` handler with retries and dead
  letters, a plain one on threads, and one of batches, which counts in PostgreSQL by `penstock.inbox`. Each returns
  results.
- **Three senders**, on `KafkaStore`, `SqlStore` (PostgreSQL) and `FileStore`: transactions of one message and of three,
  with `order="half"` and with `order="commit"`, delays, rollbacks, and decisions left to checks. The truth about each
  is a row that its local transaction inserts into PostgreSQL, behind a barrier.
- **Two coordinators** in two processes, each for Kafka and for PostgreSQL; that of the file store is in its sender.
- **A Spark query**, which stores what the store in Kafka publishes, in PostgreSQL by `SqlSink`.

A supervisor starts what ended. One worker, one coordinator and one sender reach the brokers by a proxy.
`group.protocol` is `classic` in campaigns with an even seed and `consumer` in the others.

## What was run

{campaigns}

*Records* are messages fed to the workers and messages of transactions that were sent. *Done after*: from the end of
feeding until every message was where it belongs.{notes}

{sent}

## Faults survived

{faults}

A seed draws kind, target, moment and length. A standstill is the longest time in which one of these did not go on at
all: calls of workers, visible results, visible transactions of a store, rows of Spark, counts of the inbox. It counts
for each fault that went on when it began, and faults that come later may prolong it. It holds the length of the fault
itself, and the time in which the process that feeds was held up. The machine was small (two cores for all nodes,
processes and Spark) and busy with other work: what starts again, a node or Spark, took minutes of it.

A fault counts where it happened. One whose target was being harmed already, a topic that was made to refuse, a network
without a connection to cut, or a disk on which nothing was stored meanwhile, does not.

{not_met}{exits}

## Violations

{violations}

## What is judged

| promise | how |
|---|---|
| nothing lost | {lost} |
| nothing twice | {twice} |
| nothing torn | of a transaction's messages, in two topics, all are visible or none |
| only committed | {committed} |
| order | {order} |
| goes on | nothing stands still for more than 600 s after the last fault has ended, and all is done by then |

The checker has a test of its own with a planted violation of each kind, `tests/endurance/test_endurance_checker.py`.

**Limits.** One Kafka node is away at a time. PostgreSQL runs without `fsync`, for processes are killed here, not the
machine. A full disk is a limit on the size of the files of the sender's process: the store cannot set room aside for
another segment. A clock jumps by an hour as Python's `time.time` in one process; Kafka's client library, brokers and
PostgreSQL keep the machine's. Which worker owns a partition is in doubt while faults last: calls of two workers are
compared by when they ended, not by whether they overlapped.

## Run it again

```console
$ make endurance                                         # thirty campaigns of 300 s; adds to the results
$ make endurance ARGS="--campaigns 2 --seed 5"           # seeds 5 and 6
$ make endurance ARGS="--seconds 120 --records 40000"    # shorter ones
$ make endurance ARGS=--report                           # this page
```

A seed draws the same faults; what they meet is up to the machine. Histories and logs of a campaign with a violation
are kept in `endurance-kept/`. No right of an administrator is needed.
"""

_JUDGED = {
    "lost": "each message fed has a call that ended, and a result or a dead letter; each of the inbox's is counted; "
    "each message of a committed transaction is visible; Spark has a row for each that the store in Kafka published",
    "twice": "results, dead letters, counts, visible messages and rows are there once. A message that its own producer "
    "wrote twice may have two",
    "committed": "what is visible has its row in PostgreSQL, and delayed messages are not early (by the brokers' clock;"
    " a file store has its process's, which jumps here)",
    "order": "calls of a key, beyond a redelivery (`tests/histories.py`); results of a key; messages of a key with "
    '`order="half"`',
}

_FAULTS = {
    "process killed": "SIGKILL of a worker, coordinator, sender or Spark's driver with its JVM",
    "process frozen": "SIGSTOP of one of them, 3 to 20 s",
    "broker killed": "SIGKILL of a Kafka node, back after up to 10 s",
    "broker frozen": "SIGSTOP of a Kafka node, 3 to 15 s",
    "partitions moved": "all partitions of four topics to other leaders and replicas",
    "PostgreSQL restarted": "stopped, in order or at once, for up to 8 s",
    "network cut": "connections of half of the processes to Kafka end, and none begins, 3 to 15 s",
    "network slow": "each answer of Kafka reaches them 0.4 s late, 5 to 15 s",
    "topic refuses": "a target topic takes no message of the usual size, 3 to 12 s",
    "disk full": "the file store gets no room for a new segment, 8 to 15 s",
    "clock jumped": "the wall clock of a process is an hour off, 3 to 15 s",
    "rolling deploy": "each process ends in order and is replaced, in turn",
}


def write(results: Path) -> None:
    """Write the page."""
    ran = [json.loads(line) for line in results.read_text().splitlines()]
    ran.sort(key=lambda result: result["seed"])
    PAGE.write_text(page(ran))


def page(ran: list[dict[str, Any]]) -> str:
    """Return the text of the page."""
    happened, not_met, sent, exits = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    worst: dict[str, tuple[float, str]] = {}
    for result in ran:
        happened.update(result["faults"])
        not_met.update(result["not_met"])
        sent.update(result["sent"])
        exits.update(result["exits"])
        for kind, (seconds, stream) in result["standstills"].items():
            worst[kind] = max((seconds, stream), worst.get(kind, (0.0, "")))
    records = sum(_records(result) for result in ran)
    wrong = [f"- seed {result['seed']}: {text}.{_fixed(result)}" for result in ran for text in result["violations"]]
    campaigns = [
        (
            result["seed"],
            result["at"],
            f"`{result['protocol']}`",
            f"{result['seconds']:g}",
            f"{_records(result):,}",
            sum(result["faults"].values()),
            f"{result['done_after_s']:g}",
            len(result["violations"]) or "none",
        )
        for result in ran
    ]
    faults = [(kind, what, happened[kind], *worst.get(kind, ("", ""))) for kind, what in _FAULTS.items()]
    return _TEXT.format(
        summary=f"{len(ran)} campaigns stand here, with {records:,} records and {happened.total():,} faults; "
        f"violations: {len(wrong) or 'none'}.",
        campaigns=_table(
            "seed, day, `group.protocol`, seconds, records, faults, done after (s), violations", campaigns
        ),
        notes="".join(f" Seed {result['seed']}: {result['note']}." for result in ran if "note" in result),
        sent=_listed("Messages of transactions by how their send ended", sent),
        faults=_table("fault, what it is, times, worst standstill (s), of what", faults),
        not_met=_listed("Not counted so", not_met),
        exits=_listed("Processes that ended by themselves and were started again", exits),
        violations="\n".join(wrong) or "None in these campaigns.",
        **_JUDGED,
    )


def _table(head: str, rows: list[tuple[object, ...]]) -> str:
    names = head.split(", ")
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (names, ["---"] * len(names), *rows)).replace(
        "| --- ", "|---"
    )


def _listed(what: str, counts: Counter[str]) -> str:
    text = f"{what}: {', '.join(f'{name} {count:,}' for name, count in counts.most_common())}."
    return textwrap.fill(text, 120) + "\n" if counts else ""


def _fixed(result: dict[str, Any]) -> str:
    """Return what was done about violations: `fixed`, which whoever fixes them adds to the line, as `note`."""
    return f" Fixed since: {result['fixed']}." if "fixed" in result else " **Open.**"


def _records(result: dict[str, Any]) -> int:
    return int(result["fed"]) + sum(result["sent"].values())
