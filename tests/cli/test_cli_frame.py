from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from penstock.cli import main
from penstock.devbroker import DevBroker
from penstock.errors import BrokerConnectionError, ConfigurationError, DevBrokerError


class Outcome(NamedTuple):
    code: object
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PENSTOCK_DEBUG", "0")
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP_SERVERS", raising=False)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return Outcome(left.value.code, printed.out, printed.err)

    return call


@pytest.mark.parametrize("command", ["demo", "run", "coordinator", "broker", "doctor"])
def test_the_help_of_every_command_ends_with_an_example(penstock: Call, command: str) -> None:
    outcome = penstock(command, "--help")

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
def test_wrong_use_is_told_with_code_2(penstock: Call, arguments: tuple[str, ...]) -> None:
    outcome = penstock(*arguments)

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
    penstock: Call, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("penstock.devbroker.DevBroker.start", fail)

    outcome = penstock("broker", "--port", "0")

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


def test_doctor_reports_packages_java_and_a_broker_that_answers(penstock: Call, broker: DevBroker) -> None:
    outcome = penstock("doctor", "--bootstrap-servers", broker.bootstrap_servers)

    assert outcome.code == 0
    for part in ("confluent-kafka", "pyspark", "psycopg", "Java 17+", "Kafka 4.3.1 jars", "answers"):
        assert part in outcome.out


def test_doctor_says_when_no_broker_answers(penstock: Call, hasty: list[float]) -> None:
    outcome = penstock("doctor", "--bootstrap-servers", "127.0.0.1:1")

    assert outcome.code == 3
    assert "no answer" in outcome.out
    assert "127.0.0.1:1" in outcome.err
    assert hasty == [5]


def test_a_csv_file_that_is_not_there_is_wrong_use(penstock: Call) -> None:
    outcome = penstock("demo", "--input", "no-such-file.csv", "--no-spark")

    assert outcome.code == 2
    assert "no-such-file.csv" in outcome.err
