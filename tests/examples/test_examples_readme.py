"""The README and the docs are right about files, names and tests."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from example_programs import PATIENCE_S

import penstock
from penstock.cli.frame import frame
from penstock.telemetry.observed import METRICS, TRANSACTION_METRICS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
OPERATION = (ROOT / "docs" / "operation.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.thorough
def test_the_first_program_prints_what_the_readme_says_until_it_is_interrupted() -> None:
    program = ROOT / "examples" / "consumer.py"
    assert program.read_text().split('"""\n', 1)[1].strip() in README
    said = README.split("$ python examples/consumer.py\n")[1].split("```")[0].splitlines()

    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        watchdog = threading.Timer(2 * PATIENCE_S, running.kill)
        watchdog.start()
        printed = [running.stdout.readline().strip() for _ in said]
        running.send_signal(signal.SIGINT)
        ended = running.wait()
        watchdog.cancel()

    assert sorted(printed) == said
    assert [line for line in printed if "alice" in line] == [line for line in said if "alice" in line]
    assert ended == 0


def test_the_table_of_extras_has_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    section = README.split("## Extras")[1].split("\n## ")[0]

    assert re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE) != []
    assert set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) == set(extras)


def test_the_extras_that_the_docs_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

    named = {extra for names in re.findall(r"penstock\[([\w,-]+)\]", pages) for extra in names.split(",")}

    assert named > {"cli", "dev-broker", "spark"}
    assert named <= set(extras)


def test_the_test_that_the_readme_shows_passes_for_a_handler_that_fails_and_not_for_one_that_does_not() -> None:
    [shown] = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "TestApp" in block]
    app = penstock.App("sms", bootstrap_servers="127.0.0.1:9092")
    calls: list[object] = []

    @app.handler("balance-changes", retry=penstock.retry(attempts=5), on_failure="dead_letter")
    def send_sms(message: penstock.Message) -> None:
        calls.append(message.key)
        int(message.value or b"")

    names: dict[str, object] = {"app": app}
    exec(shown, names)  # noqa: S102 - our own README
    test = names["test_a_failure_is_tried_again_and_given_up"]
    assert callable(test)

    test()
    assert calls == [b"alice"] * 5

    forgiving = penstock.App("sms", bootstrap_servers="127.0.0.1:9092")
    forgiving.handler("balance-changes", on_failure="dead_letter")(calls.append)
    names["app"] = forgiving
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.name)
def test_files_that_the_docs_name_exist(page: Path) -> None:
    text = page.read_text()

    links = [match for match in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not match.startswith("http")]
    programs = re.findall(r"`(?:examples/)?([a-z_]+\.py)`", text)

    assert links or page.name != "README.md"
    assert [link for link in links if not (page.parent / link).exists()] == []
    known = {path.name for path in (ROOT / "examples").iterdir()}
    if page.name == "architecture.md":
        known |= {path.name for path in (ROOT / "src" / "penstock").rglob("*.py")}
    assert [program for program in programs if program not in known] == []


def test_the_places_that_the_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "penstock"
    rooms = [ROOT, source, *(source / name for name in ("consumer", "transactions", "spark_sink"))]
    rooms += [source / "transactions" / "stores", source / "transactions" / "stores" / "kafka"]

    places = set(re.findall(r"[a-z_]+(?:/[a-z_]+)*(?:\.py|/(?![a-z<]))", page))

    assert len(places) > 30
    unknown = [place for place in places if not any((room / place).exists() for room in rooms)]
    assert [place for place in sorted(unknown) if "/" in place[:-1] or not list(source.rglob(place))] == []


def test_the_metrics_that_the_docs_name_are_those_that_are_reported() -> None:
    [row] = [line for line in OPERATION.splitlines() if line.startswith("| ours |")]

    named = {name if name.startswith("penstock") else f"penstock{name}" for name in re.findall(r"`([^`]+)`", row)}

    assert named == {metric.name for metric in METRICS}


def test_the_metrics_of_transactions_are_those_that_are_reported() -> None:
    page = (ROOT / "docs" / "transactions.md").read_text()
    [row] = [line for line in OPERATION.splitlines() if line.startswith("| ours, of transactions |")]

    documented = re.findall(r"^\| `(penstock\.transactions\.[a-z_]+)` \|", page, re.MULTILINE)
    named = {
        name if name.startswith("penstock") else f"penstock.transactions{name}"
        for name in re.findall(r"`([^`]+)`", row)
    }

    assert documented == [metric.name for metric in TRANSACTION_METRICS]
    assert named == set(documented)


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.name)
def test_the_commands_that_the_docs_tell_of_exist(page: Path) -> None:
    known = {command.name or getattr(command.callback, "__name__", "") for command in frame().registered_commands}
    known |= {group.typer_instance.info.name for group in frame().registered_groups if group.typer_instance is not None}

    named = set(re.findall(r"(?:`|^\$ )penstock ([a-z]+)", page.read_text(), re.MULTILINE))

    assert named <= known
    assert named or page.name != "README.md"


@pytest.mark.thorough
@pytest.mark.parametrize("command", re.findall(r"`((?:[A-Z_]+=\d+ )?\.venv/bin/python -m pytest [^`]+)`", CONTRIBUTING))
def test_what_contributing_runs_selects_tests(command: str) -> None:
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words[: words.index(".venv/bin/python")])
    arguments = words[words.index("pytest") + 1 :]

    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode == 0, found.stdout
    assert "::test_" in found.stdout
