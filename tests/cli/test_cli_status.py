"""`penstock status` and `penstock explain --group`, of apps that run in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from commands import Command
from kafka_tools import produce
from penstock.devbroker import DevBroker
from penstock.fleet import Address, Dashboard
from penstock.fleet.reports.reader import ReportReader
from penstock.fleet.reports.report import encode_report, key_hash
from penstock.fleet_member import Sender
from stalls import APP, open_transaction, running
from waiting import wait_until


@pytest.mark.thorough
def test_the_true_causes_of_stalls_are_named_elsewhere_and_on_the_page(
    broker: DevBroker,
    admin: AdminClient,
    new_topic: Callable[..., str],
    tmp_path: Path,
    penstock_command: Command,
) -> None:
    hung, poison, refused, held_back, letters = (new_topic() for _ in range(5))
    reports = f"reports-of-{hung}"
    names = {"hung": hung, "poison": poison, "refused": refused, "held_back": held_back, "letters": letters}
    text = APP.format(name=hung, servers=broker.bootstrap_servers, reports=reports, **names)
    (tmp_path / "shop.py").write_text(text)
    with (
        running(tmp_path) as process,
        open_transaction(broker.bootstrap_servers, held_back),
        Dashboard(broker.bootstrap_servers, Address("127.0.0.1", 0), topic=reports) as page,
    ):
        wait_until(lambda: any(len(one.report.partitions) == 4 for one in reports_of(broker, reports, hung)))
        for future in admin.delete_topics([letters]).values():
            future.result()
        wait_until(lambda: letters not in admin.list_topics(timeout=30).topics)
        for topic, key in ((hung, b"hung key"), (poison, b"poison key"), (refused, b"refused key")):
            produce(broker.bootstrap_servers, topic, [(key, b"a secret payload")])

        def told() -> str:
            _, out, _ = penstock_command("status", hung, *at(broker, reports))
            causes = ("Handler hangs has had", "Handler fails failed once", "given up", "is open at offset 0")
            return out if all(word in out for word in causes) else ""

        def on_page() -> str:
            with urllib.request.urlopen(f"http://{page.address}/api/groups?group={hung}", timeout=20) as answer:
                found = "\n".join(problem["text"] for problem in (json.load(answer)["group"] or {}).get("problems", ()))
            causes = ("Handler hangs has had", "Handler fails failed once", "given up", "is open at offset 0")
            return found if all(cause in found for cause in causes) else ""

        out, problems = wait_until(told, 120), wait_until(on_page, 120)
        _, as_json, _ = penstock_command("status", hung, "--json", *at(broker, reports))
        code, explained, _ = penstock_command("explain", hung, "--reports", *at(broker, reports))
        gone_code, _, gone = penstock_command("status", "no-such-group", *at(broker, reports))

    assert f"{hung}:0: lag 1, watermark 0, 1 in flight" in explained
    assert "held by offset 0, in handler hangs on penstock-worker-" in explained
    assert "time.sleep(0.02)" in out
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


def reports_of(broker: DevBroker, topic: str, group: str) -> list[Any]:
    """Return the members of a group that reports tell of; none while there is no topic."""
    try:
        with ReportReader(broker.bootstrap_servers, {}, topic) as reader:
            return [member for found in reader.groups() if found.name == group for member in found.members]
    except LookupError:
        return []


def at(broker: DevBroker, topic: str) -> tuple[str, ...]:
    return ("--bootstrap-servers", broker.bootstrap_servers, "--report-topic", topic)


@pytest.mark.thorough
def test_a_killed_member_is_told_as_silent_and_a_stopped_one_is_gone(
    broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path, penstock_command: Command
) -> None:
    topic = new_topic(partitions=2)
    (tmp_path / "shop.py").write_text(
        f"import penstock\napp = penstock.App({topic!r}, bootstrap_servers={broker.bootstrap_servers!r})\n"
        f"app.handler({topic!r})(lambda message: None)\n"
    )
    reports = "penstock.reports"
    with running(tmp_path, "shop:app", "--report") as killed, running(tmp_path, "shop:app", "--report") as stopped:
        wait_until(lambda: len(reports_of(broker, reports, topic)) == 2)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(60)
        code, out, _ = penstock_command("status", topic, "--bootstrap-servers", broker.bootstrap_servers)
        stopped.terminate()
        assert stopped.wait(120) == 0
    left = reports_of(broker, reports, topic)

    assert code == 1
    assert f"{topic}: 1 member and 1 silent" in out
    assert any("silent for" in line and f"-{killed.pid}-" in line for line in out.splitlines())
    assert [one.report.process for one in left] == [killed.pid]


def test_strangers_records_are_counted_and_break_nothing_and_a_topic_that_is_missing_is_said(
    broker: DevBroker, new_topic: Callable[..., str], penstock_command: Command
) -> None:
    topic = new_topic(partitions=2)
    key = json.dumps(["\x1b[2Jgroup", "\x1b]0;member"]).encode()
    produce(broker.bootstrap_servers, topic, [(b"key", b"value"), (key, b"{}"), (None, None), (key, b'{"version":7}')])

    code, _, error = penstock_command("status", *at(broker, topic))
    missing_code, _, missing = penstock_command("status", *at(broker, "no-reports"))

    assert (code, "no member reports" in error) == (1, True)
    assert (missing_code, "nobody has reported yet" in missing, "--report" in missing) == (1, True, True)

    with ReportReader(broker.bootstrap_servers, {}, topic) as reader:
        assert reader.states.ignored == {"unreadable": 3, "newer version": 1}


def test_watch_goes_on_until_it_is_ended(broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path) -> None:
    topic, sender = new_topic(), Sender("shop", "one", "host", 1)
    numbers = {"sequence": 1, "interval_s": 2.0, "uptime_s": 1.0}
    produce(broker.bootstrap_servers, topic, [(sender.key, encode_report(sender, {}, {}, numbers))])
    command = [sys.executable, "-m", "penstock", "status", "--watch", *at(broker, topic)]

    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stdout is not None
        shown = [next(line for line in process.stdout if line.startswith("shop: 1 member")) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        code = process.wait(30)

    assert (len(shown), code) == (2, 0)
