"""One campaign: feed and send, harm, let all be done, read what there is, and judge it."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from endurance.checker import standstills, violations
from endurance.faults import Harming
from endurance.feeding import Feeder, Watch
from endurance.plan import INPUTS, PARTITIONS, STORES, plan
from endurance.reading import ends_of_sends, history
from endurance.stage import Stage, now
from kafka_tools import ends

_log = logging.getLogger(__name__)

#: Sending threads of each order of each store.
THREADS = 2
#: The part of a campaign's records that is fed to workers; transactions have 1.5 messages on the average.
_FED, _PARTS = 0.65, 1.5
#: Seconds that a campaign's work may take to be done after the last fault, and between two looks.
DONE_S, _LOOK_S = 600.0, 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a campaign; a line of the results file.

    Attributes:
        seed: of its faults and senders.
        at: the day on which it ran.
        protocol: the `group.protocol` of the workers.
        seconds: for how long it was fed, sent and harmed.
        done_after_s: how long after that it took until all was done.
        fed: messages fed to the workers.
        sent: messages of transactions that were sent, by their end.
        results: visible results.
        dead: dead letters.
        counted: messages counted by the inbox.
        visible: visible messages of transactions.
        rows: rows that Spark stored.
        faults: how many of each kind happened.
        not_met: faults that were drawn and did not happen.
        standstills: the worst standstill by kind of fault, in seconds, and its stream.
        exits: processes that ended by themselves and were started again.
        violations: what is wrong.
    """

    seed: int
    at: str
    protocol: str
    seconds: float
    done_after_s: float
    fed: int
    sent: dict[str, int]
    results: int
    dead: int
    counted: int
    visible: int
    rows: int
    faults: dict[str, int]
    not_met: dict[str, int]
    standstills: dict[str, tuple[float, str]]
    exits: dict[str, int]
    violations: list[str]

    @property
    def records(self) -> int:
        """How many records were fed and sent."""
        return self.fed + sum(self.sent.values())


def run(seed: int, protocol: str, seconds: float, records: int, keep: Path) -> Result:
    """Run a campaign and judge it. Where it found a violation, its histories and logs are kept in a folder there."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-endurance-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user where we are root
    sending = len(STORES) * 2 * THREADS
    pause = sending * _PARTS * seconds / (records * (1 - _FED))
    try:
        with Stage(folder, seed, protocol, THREADS, pause) as stage:
            result = _run(stage, seed, protocol, seconds, records)
        if result.violations:
            _keep(folder, keep / f"seed-{seed}-{protocol}")
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(stage: Stage, seed: int, protocol: str, seconds: float, records: int) -> Result:
    watch, feeder = Watch(stage), Feeder(stage.cluster.bootstrap_servers, records * _FED / seconds)
    watch.start()
    feeder.start()
    # Spark may come later: on a busy machine it takes minutes to start.
    _await(lambda: len(watch.progress.keys() - {"Spark"}) == len(STORES) + 2, "all but Spark is at work")
    harming = Harming(stage, plan(seed, seconds), seed)
    begun = now()
    harming.run()
    # The campaign's length, where the last fault ended before.
    time.sleep(max(0.0, begun + seconds - now()))
    feeder.stop()
    (stage.folder / "quiet").touch()
    quiet = now()
    _log.info("quiet; waiting until all is done")
    is_done = _await(lambda: _is_done(stage, watch), "all is done")
    done_after_s = now() - quiet
    watch.stop()
    codes = stage.stop()
    found = history(stage, harming.faults, watch.progress, quiet)
    (stage.folder / "history.json").write_text(json.dumps(asdict(found), default=sorted))
    wrong = violations(found) + [f"the harness failed: {failure}" for failure in harming.failures]
    wrong += [] if is_done else [f"not all was done {DONE_S:.0f} s after the last fault"]
    wrong += [f"{name} ended with {code} when it was stopped" for name, code in codes.items() if code]
    return Result(
        seed=seed,
        at=datetime.now(UTC).date().isoformat(),
        protocol=protocol,
        seconds=seconds,
        done_after_s=round(done_after_s, 1),
        fed=len(found.fed),
        sent=dict(ends_of_sends(stage)),
        results=len(found.results),
        dead=len(found.dead),
        counted=len(found.counted),
        visible=len(found.visible),
        rows=len(found.stored or ()),
        faults=dict(Counter(fault.kind for fault in harming.faults)),
        not_met=dict(harming.not_met),
        standstills={kind: (round(s, 1), stream) for kind, (s, stream) in standstills(found).items()},
        exits=dict(stage.exits),
        violations=wrong,
    )


def _is_done(stage: Stage, watch: Watch) -> bool:
    """Return whether everything seems to be in its place: a signal to begin the judgement, not the judgement."""
    servers, seen = stage.cluster.bootstrap_servers, watch.seen
    fed = {topic: sum(ends(servers, topic, PARTITIONS).values()) for topic in INPUTS}
    with stage.connect() as connection:
        found = connection.execute("SELECT store, sum(parts) FROM sent GROUP BY store").fetchall()
    of_stores = {store: seen[f"{store}-target"] + seen[f"{store}-second"] for store in STORES}
    missing = {store: parts - of_stores[store] for store, parts in found}
    missing["results"] = sum(fed.values()) - seen["results"] - seen["dlq.singles"]
    missing["counted"] = fed["batched"] - seen["counted"]
    missing["stored"] = of_stores["kafka"] - seen["stored"]
    _log.info("still missing: %s", {name: int(count) for name, count in missing.items() if count})
    return all(count <= 0 for count in missing.values())


def _await(condition: Callable[[], bool], what: str) -> bool:
    """Wait until a condition holds, and return whether it does; a failing question is repeated."""
    deadline = now() + DONE_S
    while now() < deadline:
        try:
            if condition():
                return True
        except Exception as error:  # noqa: BLE001 - the cluster may just be coming back
            _log.info("cannot tell whether %s: %r", what, error)
        time.sleep(_LOOK_S)
    _log.warning("it did not come to this: %s", what)
    return False


def _keep(folder: Path, kept: Path) -> None:
    """Keep histories and logs of processes."""
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for path in (*folder.glob("*.json*"), *folder.glob("*.log")):
        shutil.copy(path, kept)
    _log.warning("histories and logs are kept in %s", kept)


def line(result: Result) -> str:
    """Return a result as a line of JSON."""
    return json.dumps(asdict(result))
