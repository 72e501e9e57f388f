from __future__ import annotations

import subprocess
import sys

import pytest

from commands import Command
from penstock.cli import main
from penstock.devbroker import KAFKA_VERSION, DevBroker
from penstock.errors import BrokerConnectionError, ConfigurationError, DevBrokerError


@pytest.mark.parametrize("command", ["demo", "run", "lag", "coordinator", "broker", "doctor"])
def test_the_help_of_every_command_ends_with_an_example(penstock_command: Command, command: str) -> None:
    outcome = penstock_command(command, "--help")

    assert outcome.code == 0
    assert outcome.out.rstrip().splitlines()[-1].strip().startswith(f"Example: penstock {command}")


def test_help_loads_no_engine() -> None:
    engines = ("confluent_kafka", "pyspark", "penstock.demo", "penstock.app")
    program = (
        "import sys\nfrom penstock.cli.frame import frame\nframe()\n"
        f"print([name for name in {engines} if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments", [("no-such-command",), ("broker", "--port", "many"), ("broker", "--port", "70000"), ("coordinator",)]
)
def test_wrong_use_is_told_with_code_2(penstock_command: Command, arguments: tuple[str, ...]) -> None:
    outcome = penstock_command(*arguments)

    assert outcome.code == 2
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("the option is wrong"), 2),
        (BrokerConnectionError("no broker answered"), 3),
        (DevBrokerError("it did not start"), 1),
        (KeyError("surprise"), 1),
    ],
)
def test_an_error_is_one_sentence_and_a_code(
    penstock_command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("penstock.devbroker.DevBroker.start", fail)

    outcome = penstock_command("broker", "--port", "0")

    assert outcome.code == code
    assert str(error) in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1


def test_debug_shows_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise DevBrokerError("it did not start")

    monkeypatch.setattr("penstock.devbroker.DevBroker.start", fail)
    monkeypatch.setenv("PENSTOCK_DEBUG", "0")
    monkeypatch.setattr(sys, "argv", ["penstock", "--debug", "broker", "--port", "0"])

    with pytest.raises(DevBrokerError):
        main()


def test_doctor_reports_packages_java_and_a_broker_that_answers(penstock_command: Command, broker: DevBroker) -> None:
    outcome = penstock_command("doctor", "--bootstrap-servers", broker.bootstrap_servers)

    assert outcome.code == 0
    for part in ("confluent-kafka", "pyspark", "psycopg", "Java 17+", f"Kafka {KAFKA_VERSION} jars", "answers"):
        assert part in outcome.out


def test_doctor_says_when_no_broker_answers(penstock_command: Command, hasty: list[float]) -> None:
    outcome = penstock_command("doctor", "--bootstrap-servers", "127.0.0.1:1")

    assert outcome.code == 3
    assert "no answer" in outcome.out
    assert "127.0.0.1:1" in outcome.err
    assert hasty == [5]


def test_a_csv_file_that_is_not_there_is_wrong_use(penstock_command: Command) -> None:
    outcome = penstock_command("demo", "--input", "no-such-file.csv", "--no-spark")

    assert outcome.code == 2
    assert "no-such-file.csv" in outcome.err
