"""`penstock status` and `penstock explain --group`, of apps that run in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from commands import Command
from kafka_tools import produce
from penstock.devbroker import DevBroker
from penstock.fleet import Address, Dashboard
from penstock.fleet.reports.report import encode_report, key_hash
from penstock.fleet_member import Sender
from stalls import APP, open_transaction, running
from waiting import wait_until


@pytest.mark.thorough
def test_the_true_causes_of_stalls_are_named_elsewhere_and_on_the_page(
    broker: DevBroker, admin: AdminClient, new_topic: Callable[..., str], tmp_path: Path, on_broker: Command
) -> None:
    hung, poison, refused, held_back, letters = (new_topic() for _ in range(5))
    reports = f"reports-of-{hung}"
    at = ("--report-topic", reports)
    names = {"hung": hung, "poison": poison, "refused": refused, "held_back": held_back, "letters": letters}
    text = APP.format(name=hung, servers=broker.bootstrap_servers, reports=reports, **names)
    (tmp_path / "shop.py").write_text(text)
    with (
        running(tmp_path) as process,
        open_transaction(broker.bootstrap_servers, held_back),
        Dashboard(broker.bootstrap_servers, Address("127.0.0.1", 0), topic=reports) as page,
    ):
        wait_until(lambda: f"{hung}: 1 member, 4 partitions" in on_broker("status", hung, *at).out)
        for future in admin.delete_topics([letters]).values():
            future.result()
        wait_until(lambda: letters not in admin.list_topics(timeout=30).topics)
        for topic, key in ((hung, b"hung key"), (poison, b"poison key"), (refused, b"refused key")):
            produce(broker.bootstrap_servers, topic, [(key, b"a secret payload")])

        causes = ("in handler hangs on", "parked (fails) for", "given up", "is open at offset 0")

        def printed() -> str:
            _, out, _ = on_broker("status", hung, *at)
            return out if all(cause in out for cause in causes) else ""

        def on_page() -> str:
            with urllib.request.urlopen(f"http://{page.address}/api/groups?group={hung}", timeout=20) as answer:
                found = "\n".join(problem["text"] for problem in (json.load(answer)["group"] or {}).get("problems", ()))
            return found if all(cause in found for cause in causes) else ""

        out, problems = wait_until(printed, 120), wait_until(on_page, 120)
        _, as_json, _ = on_broker("status", hung, "--json", *at)
        code, explained, _ = on_broker("explain", hung, "--reports", *at)
        gone_code, _, gone = on_broker("status", "no-such-group", *at)

    assert f"{hung}:0: lag 1, watermark 0, 1 in flight" in explained
    assert "held by offset 0, in handler hangs on penstock-worker-" in explained
    assert "time.sleep" not in out, "the action Stacks alone shows them"
    assert f"{poison}:0" in out
    assert letters in next(line for line in explained.splitlines() if line.strip().startswith(f"{refused}:0:"))
    # Nothing of it can be read yet, so it has no position.
    assert (
        f"{held_back}:0: position not known yet (no offset and no message so far), "
        "a transaction that another producer began is open at offset 0" in explained
    )
    assert f"describe-producers --topic {held_back} --partition 0" in out
    assert f"key hash {key_hash('hung key', hung)}" in explained
    assert not [one for one in ("hung key", "poison key", "secret") if one in out + as_json + explained + problems]
    [member] = json.loads(as_json)["members"]
    assert (member["process"], member["is_silent"], member["counts"]["parked_keys"]) == (process.pid, False, 2)
    assert (code, explained.count("held by offset 0")) == (0, 3)
    assert (gone_code, "no member of no-such-group reports to" in gone) == (1, True)


def test_strangers_records_break_nothing_a_watch_goes_on_until_it_is_ended_and_an_only_member_falls_silent(
    on_broker: Command, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, sender = new_topic(partitions=2), Sender("shop", "one", "host", 1)
    key = json.dumps(["\x1b[2Jgroup", "\x1b]0;member"]).encode()
    strangers = [(b"key", b"value"), (key, b"{}"), (None, None), (key, b'{"version":7}')]
    report = encode_report(sender, {}, {}, {"sequence": 1, "interval_s": 60.0, "uptime_s": 1.0})
    command = [sys.executable, "-m", "penstock", "status", "--watch", "--report-topic", topic]

    produce(broker.bootstrap_servers, topic, strangers)
    empty = on_broker("status", "--report-topic", topic)
    missing = on_broker("status", "--report-topic", "no-reports")
    produce(broker.bootstrap_servers, topic, [(sender.key, report)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stdout is not None
        shown = [next(line for line in process.stdout if line.startswith("shop: 1 member")) for _ in range(2)]
        counted = next(line for line in process.stdout if "ignored records, which are no reports" in line)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    produce(broker.bootstrap_servers, topic, [(sender.key, report.replace(b":60.0", b":0.5"))])
    silent = on_broker("status", "--report-topic", topic)

    assert (empty.code, "no member reports" in empty.err) == (1, True)
    assert (missing.code, "no member has reported yet" in missing.err, "--report" in missing.err) == (1, True, True)
    assert (len(shown), code) == (2, 0)
    assert "1 newer version, 3 unreadable" in counted
    printed = "shop: 0 members and 1 silent, 0 partitions, lag unknown"
    assert (silent.code, printed in silent.out, "silent for" in silent.out) == (1, True, True)
