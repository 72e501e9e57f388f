"""`deploy/`: each file by the tool that reads it, where that is there, and every metric by what the code shows."""

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

import kubernetes_validate
import promql_parser
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from penstock import App
from prometheus_tools import scraped

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "penstock.rules.yaml"
#: What the exporter, and Prometheus itself, show beside the app's own.
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


def manifests() -> list[dict[str, Any]]:
    return [
        one
        for name in ("worker.yaml", "scaling.yaml")
        for one in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    ]


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [one for one in manifests() if one["kind"] == kind]
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
    labels = {name for one in shown.values() for name in one} | OF_PROMETHEUS
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
    told = set(re.findall(r"`((?:penstock|messaging)_\w+)`", text.partition("| metric | alert when |")[2]))
    names = {re.sub(r"(?<=_seconds)_(bucket|count|sum)$", "", name) for name in shown if name != "target_info"}

    assert told == names
    assert set(re.findall(r"`(Penstock\w+)`", text)) == {rule["alert"] for rule in rules}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed; the parser has read them")
@pytest.mark.parametrize("command", [("check", "rules", RULES.name), ("test", "rules", "penstock.rules.test.yaml")])
def test_promtool_takes_the_rules(command: tuple[str, ...]) -> None:
    subprocess.run(["promtool", *command], cwd=RULES.parent, check=True, timeout=60)


def test_the_manifests_follow_the_schemas_of_kubernetes() -> None:
    for one in manifests():
        if one["apiVersion"].startswith("keda.sh/"):
            continue
        kubernetes_validate.validate(one, "1.31", strict=True)


def test_the_autoscaler_follows_kedas_schema() -> None:
    one = manifest("ScaledObject")
    spec, (trigger,) = one["spec"], one["spec"]["triggers"]

    # config/crd/bases/keda.sh_scaledobjects.yaml, and the page of the Kafka scaler.
    assert one["apiVersion"] == "keda.sh/v1alpha1"
    assert set(spec) <= {
        *("scaleTargetRef", "pollingInterval", "cooldownPeriod", "minReplicaCount", "maxReplicaCount"),
        *("advanced", "triggers", "fallback", "idleReplicaCount", "initialCooldownPeriod"),
    }
    assert trigger["type"] == "kafka"
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert {"bootstrapServers", "consumerGroup", "topic", "lagThreshold"} <= set(trigger["metadata"])
    assert spec["scaleTargetRef"]["name"] == manifest("Deployment")["metadata"]["name"]
    behavior = {"minReplicas": 1, "maxReplicas": 2, "scaleTargetRef": {"kind": "Deployment", "name": "orders"}}
    scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "orders"}}
    behavior |= {"behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]}
    kubernetes_validate.validate({**scaler, "spec": behavior}, "1.31", strict=True)


def test_the_pods_have_time_to_drain_are_probed_where_the_app_answers_and_belong_together() -> None:
    deployment, budget = manifest("Deployment"), manifest("PodDisruptionBudget")
    pod = deployment["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    stop_timeout = inspect.signature(App).parameters["stop_timeout"].default

    assert pod["terminationGracePeriodSeconds"] >= stop_timeout + 15
    probes = {name: worker[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    (port,) = worker["ports"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert worker["args"][worker["args"].index("--http") + 1] == f"0.0.0.0:{port['containerPort']}"
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == budget["spec"]["selector"]["matchLabels"]
    assert pod["securityContext"]["runAsNonRoot"]


def test_the_image_runs_as_a_user_has_no_java_and_hears_signals() -> None:
    file = DockerfileParser(fileobj=(DEPLOY / "Dockerfile").open("rb"))
    lines = [(one["instruction"], one["value"]) for one in file.structure if one["instruction"] != "COMMENT"]
    last = lines[max(place for place, (name, _) in enumerate(lines) if name == "FROM") :]
    stage = dict(last)

    assert file.is_multistage
    assert all(base.endswith("-slim") for base in file.parent_images)
    assert stage["USER"] == "10001:10001"
    assert json.loads(stage["ENTRYPOINT"]) == ["penstock"]  # the exec form: no shell keeps signals to itself
    assert json.loads(stage["CMD"])[:1] == ["run"]
    assert not re.search("jdk|jre|java|spark|apt-get", " ".join(value for _, value in lines), re.IGNORECASE)
    for name, value in lines:
        if name == "COPY" and not value.startswith("--from"):
            assert all((ROOT / source).exists() for source in value.split()[:-1]), value
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"!src", "!requirements.lock", "!pyproject.toml", "!README.md", "!LICENSE", "!examples"} <= set(ignored)


def test_the_image_takes_the_versions_of_the_lock(tmp_path: Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (program,) = re.findall(r"RUN (sed .*) > versions.txt", text)

    listed = subprocess.run(program, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()  # noqa: S602 - the line of the file itself

    locked = re.findall(r"^([A-Za-z0-9._-]+==[^ ;\\]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert listed == locked
    assert {one.partition("==")[0] for one in listed} > {"confluent-kafka", "starlette", "uvicorn", "uvloop"}


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
