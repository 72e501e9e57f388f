"""Writes docs/endurance.md from the results of campaigns: the page contains only what ran."""

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

A campaign runs all parts of penstock on three Kafka nodes and injects faults for minutes, several at once. Then a
checker that imports nothing of penstock judges the histories.

{summary}

## What runs

- **Two workers** in two processes, of one app with `exactly_once=True`: an `async def` handler with retries and dead
  letters, a plain handler on threads, and a handler of batches, which counts in PostgreSQL with `penstock.inbox`. Each
  returns results.
- **Three senders**, on `KafkaStore`, `SqlStore` (PostgreSQL) and `FileStore`: transactions of one message and of three,
  with `order="half"` and with `order="commit"`, delays, rollbacks, and decisions left to checks. The local transaction
  of each inserts a row into PostgreSQL, with a barrier; this row is the truth.
- **Two coordinators** in two processes, each for Kafka and for PostgreSQL. The file store's is in its sender.
- **A Spark query**, which stores the published messages of the store in Kafka in PostgreSQL, with `SqlSink`.

A supervisor restarts processes that ended. One worker, one coordinator and one sender connect to the brokers through a
proxy. `group.protocol` is `classic` in campaigns with an even seed and `consumer` in the others.

## What was run

{campaigns}

*Records* are messages for the workers and sent messages of transactions. *Done after* is the time from the last message
for the workers until every message was where it belongs.{notes}

{sent}

## Faults survived

{faults}

The seed selects kind, target, moment and length of each fault. A standstill is the longest time without any progress of
one of these: calls of workers, visible results, visible transactions of a store, rows of Spark, counts of the inbox. It
counts for each fault that lasted when it began, and later faults may prolong it. It includes the length of the fault
itself, and delays of the process that writes the messages. The machine was small (two cores for everything) and busy
with other work, so a restart of a node or of Spark took minutes.

A fault counts only if it had an effect. It does not count if another fault lasted at its target, if nothing was written
to the topic that refused, if the network had no connection to cut, or if nothing was stored on the full disk.

{not_met}{exits}

## Violations

{violations}

## What is judged

| promise | how |
|---|---|
| nothing lost | {lost} |
| nothing twice | {twice} |
| nothing torn | all messages of a transaction, in two topics, are visible, or none is |
| only committed | {committed} |
| order | {order} |
| goes on | nothing stands still for more than 600 s after the end of the last fault, and then all is done |

A test plants a violation of each kind and sees that the checker finds it: `tests/endurance/test_endurance_checker.py`.

**Limits.** One Kafka node is away at a time. PostgreSQL runs without `fsync`: processes are killed here, not the
machine. A full disk is a limit on the size of the files of the sender's process: the store cannot reserve another
segment. A clock jump changes Python's `time.time` of one process by an hour. Kafka's client library, brokers and
PostgreSQL keep the machine's clock. While faults last, it is not known which worker owns a partition. So calls of two
workers are compared by the time of their end; overlaps are not judged.

## Run it again

```console
$ make endurance                                         # thirty campaigns of 300 s; adds to the results
$ make endurance ARGS="--campaigns 2 --seed 5"           # seeds 5 and 6
$ make endurance ARGS="--seconds 120 --records 40000"    # shorter campaigns
$ make endurance ARGS=--report                           # this page
```

The same seed injects the same faults; their effects depend on the machine. Histories and logs of a campaign with a
violation are kept in `endurance-kept/`. It runs without root.
"""

_JUDGED = {
    "lost": "each message for the workers has a call that ended, and a result or a dead letter; each of the inbox's "
    "topic is counted; each message of a committed transaction is visible; Spark has a row for each of `KafkaStore`",
    "twice": "each result, dead letter, count, visible message and row exists once. A message that its own producer "
    "wrote twice may have two",
    "committed": "each visible message has its row in PostgreSQL, and delayed messages are not early (by the brokers' "
    "clock; a file store uses the clock of its process, which jumps here)",
    "order": "calls of a key, except redeliveries (`tests/histories.py`); results of a key; messages of a key with "
    '`order="half"`',
}

_FAULTS = {
    "process killed": "SIGKILL of a worker, a coordinator, a sender, or Spark's driver with its JVM",
    "process frozen": "SIGSTOP of one of them, 3 to 20 s",
    "broker killed": "SIGKILL of a Kafka node, back after up to 10 s",
    "broker frozen": "SIGSTOP of a Kafka node, 3 to 15 s",
    "partitions moved": "all partitions of four topics get other leaders and replicas",
    "PostgreSQL restarted": "stopped, gracefully or at once, for up to 8 s",
    "network cut": "half of the processes lose their connections to Kafka and get no new ones, 3 to 15 s",
    "network slow": "each answer of Kafka to them is delayed by 0.4 s, 5 to 15 s",
    "topic refuses": "a target topic refuses messages of the usual size, 3 to 12 s",
    "disk full": "the file store gets no space for a new segment, 8 to 15 s",
    "clock jumped": "the wall clock of a process is an hour off, 3 to 15 s",
    "rolling deploy": "each process in turn is stopped gracefully and replaced",
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
        summary=f"{len(ran)} campaigns, with {records:,} records and {happened.total():,} faults; "
        f"violations: {len(wrong) or 'none'}.",
        campaigns=_table(
            "seed, day, `group.protocol`, seconds, records, faults, done after (s), violations", campaigns
        ),
        notes="".join(f" Seed {result['seed']}: {result['note']}." for result in ran if "note" in result),
        sent=_listed("Messages of transactions, by the result of their send", sent),
        faults=_table("fault, what it is, times, worst standstill (s), of", faults),
        not_met=_listed("Faults without an effect", not_met),
        exits=_listed("Processes that ended by themselves and were restarted", exits),
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
    """Return the fix of the violations: the field `fixed`, which is added to the line by hand, as `note` is."""
    return f" Fixed since: {result['fixed']}." if "fixed" in result else " **Open.**"


def _records(result: dict[str, Any]) -> int:
    return int(result["fed"]) + sum(result["sent"].values())
