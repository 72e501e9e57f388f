from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main

from commands import Command
from penstock.cli import main
from penstock.cli.frame import frame
from penstock.cli.options import Cluster
from penstock.devbroker import KAFKA_VERSION, DevBroker
from penstock.errors import BrokerConnectionError, ConfigurationError, DevBrokerError, WorkersBlockedError
from settings_tools import clean_settings

#: Commands that run until they are stopped: all others print what they found, as JSON too.
RUN_ON = {"run", "demo", "broker", "coordinator", "dashboard"}
#: Commands that need no broker.
WITHOUT_BROKER = {"new", "demo", "broker", "tx create-tables"}
_ID = "018f4e9c-5c1e-7abc-8def-0123456789ab"
#: What each command that reads from Kafka asks for, and what it says that it could not do; a service says only where.
READS = {
    "lag sms": "the offsets of group sms cannot be read",
    "offsets ls sms": "the offsets of group sms cannot be read",
    "offsets reset sms --to earliest": "the offsets of group sms cannot be read",
    "offsets skip sms orders:0@1": "the offsets of group sms cannot be read",
    "dlq ls --all": "dead letters cannot be read",
    "dlq show dlq.orders": "dead letters cannot be read",
    "dlq replay dlq.orders": "dead letters cannot be read",
    "tx ls": "the transactions of penstock cannot be read",
    **{f"tx {verb} {_ID}": "the transactions of penstock cannot" for verb in ("show", "commit", "rollback", "discard")},
    f"tx resume {_ID}": "the transactions of penstock cannot be read",
    "sink ls --kafka": "the ledger in penstock.spark-ledger cannot be read",
    "sink show orders --kafka": "the ledger in penstock.spark-ledger cannot be read",
    "sink reset orders --kafka --to orders:0@3": "the ledger in penstock.spark-ledger cannot be read",
    "sink rename orders others --kafka": "the ledger in penstock.spark-ledger cannot be read",
    "status": "the reports in penstock.reports cannot be read",
    "explain sms --reports": "the reports in penstock.reports cannot be read",
    "audit": "the audit in penstock.audit cannot be read",
    "doctor": "the topics cannot be read",
    "check no_broker:app": "no Kafka broker answered at 127.0.0.1:1 within 0.3 s",
    "topics create no_broker:app": "no Kafka broker answered at 127.0.0.1:1 within 0.3 s",
    "run no_broker:app": "",
    "coordinator": "",
}


def leaves(command: Any, name: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, child in command.commands.items():
        full = f"{name} {word}".strip()
        found |= leaves(child, full) if hasattr(child, "commands") else {full: child}
    return found


COMMANDS = leaves(typer.main.get_command(frame()))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_ends_with_an_example(penstock_command: Command, command: str) -> None:
    outcome = penstock_command(*command.split(), "--help")

    assert outcome.code == 0
    assert outcome.out.rstrip().splitlines()[-1].strip().startswith(f"Example: penstock {command}")
    assert ("--json" in outcome.out) == (command not in RUN_ON)


def test_the_same_option_has_the_same_name_and_meaning_everywhere() -> None:
    options = [option for command in COMMANDS.values() for option in command.params]
    meanings = {
        "--bootstrap-servers": 2,  # an app names brokers itself
        "--config": 1,
        "--config-file": 1,
        "--connect-timeout": 1,
        "--json": 1,
    }

    assert {name: len({it.help for it in options if name in it.opts}) for name in meanings} == meanings
    assert not [it for it in options if it.required and it.opts[0] == "--bootstrap-servers"]


def test_the_version_is_printed_and_help_names_tables_as_they_are_written(
    penstock_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    printed, shown = penstock_command("--version"), penstock_command("--help")

    assert (printed.code, printed.out) == (0, f"penstock {version('penstock')}\n")
    assert "the table [profiles.NAME] of penstock.toml" in shown.out


def test_help_loads_no_engine() -> None:
    engines = ("confluent_kafka", "pyspark", "penstock.app")
    program = (
        "import sys\nfrom penstock.cli.frame import frame\nframe()\n"
        f"print([name for name in {engines} if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        "no-such-command",
        "broker --port 70000",
        "broker --port 0 --acls",
        "coordinator",
        "coordinator --bootstrap-servers 127.0.0.1:1 --discard=ask",
        "coordinator --bootstrap-servers 127.0.0.1:1 --config=canary",
        "coordinator --bootstrap-servers 127.0.0.1:1 --config==canary",
        "run shop:app --reload --processes 2",
        "run shop:app --set workers",
        "run shop:app --set config=a=b",
        "dlq ls",
        "dlq ls dlq.orders --all",
        f"dlq show dlq.orders --last {10**22}",
        "dlq show dlq.orders:0@-1",
        "dlq show dlq.orders:0@\u0661",
        "dlq show dlq.orders:0@1 --last 2",
        "lag sms",
        "explain --reports",
        "offsets skip sms orders:3",
        "dlq replay dlq.orders --where colour=red",
        "dlq replay dlq.orders --where topic=a --where topic=b",
        "dlq replay dlq.orders --from 0",
        "dlq replay dlq.orders --from dlq.others:0@1",
        "dlq replay dlq.orders:0@1 --from 0@1",
        "demo --no-spark --input no-such-file.csv",
    ],
)
def test_wrong_use_is_an_error_with_code_2(penstock_command: Command, arguments: str) -> None:
    outcome = penstock_command(*arguments.split())

    assert (outcome.code, bool(outcome.err.strip())) == (2, True), outcome
    assert not any(word in outcome.err for word in ("canary", "Traceback"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("the option is wrong"), 2),
        (BrokerConnectionError("no broker answered"), 3),
        (DevBrokerError("it did not start"), 1),
        (WorkersBlockedError("1 of 2 worker threads are in handlers that do not return"), 4),
        (KeyError("surprise"), 1),
    ],
)
def test_an_error_is_one_sentence_and_a_code_and_debug_shows_the_stack(
    penstock_command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("penstock.devbroker.DevBroker.start", fail)

    outcome = penstock_command("broker", "--port", "0")
    monkeypatch.setattr(sys, "argv", ["penstock", "--debug", "broker", "--port", "0"])
    with pytest.raises(type(error)):
        main()

    assert (outcome.code, len(outcome.err.strip().splitlines())) == (code, 1)
    assert str(error) in outcome.err


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        ("lag sms --bootstrap-servers 127.0.0.1:1 --connect-timeout 0.3", "BrokerConnectionError", 3),
        ("dlq ls --connect-timeout inf", "BadParameter", 2),
        ("lag sms --no-such-option", "NoSuchOption", 2),
        ("sink ls --sql sqlite:///no-such-file.db", "PenstockError", 1),
    ],
)
def test_with_json_an_error_is_one_json_object_on_standard_error(
    penstock_command: Command, arguments: str, kind: str, code: int
) -> None:
    outcome = penstock_command(*arguments.split(), "--json")

    (said,) = [json.loads(outcome.err.splitlines()[-1])["error"]]
    assert (outcome.code, outcome.out) == (code, "")
    assert (said["kind"], said["exit_code"], sorted(said)) == (kind, code, ["exit_code", "kind", "text"])
    assert said["text"]


def test_the_command_line_goes_before_the_file_and_the_file_before_the_environment_which_may_be_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = '{"client.id": "environment", "client.rack": " a\\nb\\"c ", "socket.keepalive.enable": true}'
    monkeypatch.setenv("PENSTOCK_CONFIG", environment)
    file = tmp_path / "client.properties"
    file.write_text("# a comment\n\nclient.id = file\nsasl.password=p #=1; \n", encoding="utf-8")

    assert Cluster(config=["client.id=line"], config_file=file).settings == {
        "client.id": "line",
        "sasl.password": "p #=1;",
        "client.rack": ' a\nb"c ',
        "socket.keepalive.enable": "true",
    }
    assert Cluster(config_file=file).settings["client.id"] == "file"
    assert Cluster().settings["client.id"] == "environment"


def test_doctor_reports_packages_java_and_a_broker_that_answers(penstock_command: Command, broker: DevBroker) -> None:
    outcome = penstock_command("doctor", "--bootstrap-servers", broker.bootstrap_servers)

    assert outcome.code == 0
    for part in ("confluent-kafka", "pyspark", "psycopg", "Java 17+", f"Kafka {KAFKA_VERSION} jars", "answers"):
        assert part in outcome.out


def test_what_a_command_does_without_a_broker_is_known_of_all() -> None:
    known = {name for command in READS for name in COMMANDS if command.startswith(name)}

    assert known | WITHOUT_BROKER | {"dashboard"} == set(COMMANDS)
    (seconds,) = {it.default for command in COMMANDS.values() for it in command.params if it.name == "connect_timeout"}
    assert seconds <= 5


@pytest.mark.parametrize("command", READS)
def test_without_a_broker_a_command_ends_with_code_3_and_says_what_it_wanted(
    penstock_command: Command, command: str, hasty: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_broker.py").write_text(
        "import penstock\napp = penstock.App('shop', bootstrap_servers='127.0.0.1:1')\napp.handler('orders')(print)\n"
    )
    clean_settings(monkeypatch, tmp_path)

    soon = ("--connect-timeout", "0.3") if READS[command] else ()
    outcome = penstock_command(*command.split(), "--bootstrap-servers", "127.0.0.1:1", *soon)

    assert (outcome.code, "Traceback" in outcome.err) == (3, False), outcome.err
    assert f"penstock: {READS[command]}" in outcome.err
    assert "127.0.0.1:1" in outcome.err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("./cannot_run_shop:app", "MODULE:APP"),
        ("nowhere:app", "no module nowhere"),
        ("cannot_run_shop:nothing", "has no 'nothing'"),
        ("cannot_run_shop:not_an_app", "not a penstock.App"),
        ("cannot_run_wrong:app --set workers=0", "but is 0 (from the command line) (cannot_run_wrong.py, line 2)"),
        ("cannot_run_unset:app", "KeyError: 'NO_SUCH_VARIABLE' (cannot_run_unset.py, line 2)"),
        ("cannot_run_json:app", "line 1 column 1 (char 0) (cannot_run_json.py, line 2)"),
        ("cannot_run_shop:app --http 8400", "write HOST:PORT"),
        ("cannot_run_shop:app --http 127.0.0.1:0 --handler-limit -1", "handler limit must be a number above zero"),
    ],
)
def test_an_app_that_cannot_be_run_says_why(
    penstock_command: Command, target: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cannot_run_unset.py").write_text("import os\nos.environ['NO_SUCH_VARIABLE']\n")
    (tmp_path / "cannot_run_json.py").write_text("import json\njson.loads('')\n")
    (tmp_path / "cannot_run_shop.py").write_text(
        "import penstock\nnot_an_app = 1\napp = penstock.App('shop', bootstrap_servers='127.0.0.1:1')\n"
    )
    (tmp_path / "cannot_run_wrong.py").write_text("import penstock as p\np.App('a', bootstrap_servers='b')")
    clean_settings(monkeypatch, tmp_path)

    outcome = penstock_command("run", *target.split())

    assert (outcome.code, says in outcome.err, "Traceback" in outcome.err) == (2, True, False), outcome.err
