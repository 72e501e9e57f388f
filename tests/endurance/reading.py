"""Reads the results of a campaign from topics, tables and files for the checker."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Message as ClientMessage

from endurance.checker import Fault, Fed, History, Outcome, Sent, Visible
from endurance.plan import INPUTS, TARGETS
from endurance.stage import Stage
from histories import Call
from kafka_tools import read_all

#: Seconds that a topic may take to be read.
_READ_S = 240.0


class Begun(NamedTuple):
    """A call that a worker wrote down when it began."""

    at: float
    topic: str
    key: str
    partition: int
    offset: int


def history(stage: Stage, faults: Sequence[Fault], progress: Mapping[str, Sequence[float]], quiet: float) -> History:
    """Read topics, tables and files."""
    servers = stage.cluster.bootstrap_servers

    def read(*topics: str) -> Iterable[ClientMessage]:
        return (message for topic in topics for message in read_all(servers, topic, timeout=_READ_S))

    with stage.connect() as connection:
        counted = [number for (number,) in connection.execute("SELECT number FROM counted")]
        sent = [Sent(*row) for row in connection.execute("SELECT store, name, parts, due FROM sent")]
        stored = dict(connection.execute("SELECT name, times FROM stored").fetchall())
    calls = _calls(stage)
    worked = [call.end for of_topic in calls.values() for call in of_topic if call.end is not None]
    return History(
        fed=[
            Fed(m.topic() or "", m.partition() or 0, m.offset() or 0, _text(m.key()), int(_text(m.value())))
            for m in read(*INPUTS)
        ],
        calls=dict(calls),
        results=[_result(message) for message in read("results")],
        dead=[Outcome("singles", _text(m.key()), int(_text(m.value()))) for m in read("dlq.singles")],
        counted=counted,
        sent=sent,
        visible=[_visible(message) for message in read(*TARGETS)],
        stored=stored,
        faults=faults,
        progress={**progress, "workers": worked},
        quiet=quiet,
    )


def _calls(stage: Stage) -> dict[str, list[Call]]:
    """Read what workers wrote down; a call that failed is made again, and is left out."""
    found: dict[str, list[Call]] = defaultdict(list)
    for path in sorted(stage.folder.glob("worker-*.jsonl")):
        begun: dict[int, Begun] = {}
        ended: dict[int, float] = {}
        for kind, at, serial, *rest in _lines(path):
            if kind == "begin":
                begun[serial] = Begun(at, *rest)
            elif kind == "end":
                ended[serial] = at
            else:
                del begun[serial]
        # Messages of one key in one batch begin and end together, and stand for calls one after the other.
        together: dict[Begun, list[int]] = defaultdict(list)
        for serial, call in begun.items():
            together[call._replace(offset=0)].append(serial)
        for of_key, serials in together.items():
            end = ended.get(serials[0])
            # Of a batch that was cut off the first message of a key had begun.
            of_call = serials if end is not None else serials[:1]
            step = 0.0 if end is None else (end - of_key.at) / len(serials)
            bounds = [of_key.at + place * step for place in range(len(of_call))]
            for serial, start, until in zip(of_call, bounds, [*bounds[1:], end], strict=True):
                offset = begun[serial].offset
                found[of_key.topic].append(Call(path.stem, of_key.key, of_key.partition, offset, start, until))
    return found


def ends_of_sends(stage: Stage) -> Counter[str]:
    """Return how many messages were sent, by how their send ended."""
    found: Counter[str] = Counter()
    for path in stage.folder.glob("sender-*.jsonl"):
        for _, _, outcome, parts in _lines(path):
            found[outcome] += parts
    return found


def _lines(path: Path) -> Iterable[list[Any]]:
    """Return the lines of a history; the last one may be torn, where its process was killed."""
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def _result(message: ClientMessage) -> Outcome:
    value = json.loads(message.value() or b"")
    return Outcome(value["of"], _text(message.key()), value["number"])


def _visible(message: ClientMessage) -> Visible:
    value = json.loads(message.value() or b"")
    key, appended_s = _text(message.key()), message.timestamp()[1] / 1000
    return Visible(message.topic() or "", key, value["id"], value["part"], value["number"], appended_s)


def _text(data: bytes | str | None) -> str:
    return data.decode() if isinstance(data, bytes) else data or ""
