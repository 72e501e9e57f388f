"""`deploy/kubernetes`, `deploy/helm`, `deploy/compose.yaml`: their commands exist and are probed at their addresses."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml

from deploy_tools import command_of, require_app, require_command, stage
from penstock import App
from penstock.devbroker import KAFKA_VERSION
from penstock.fleet import Address, Dashboard
from penstock.settings.text import client_settings_text

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "penstock"
#: The schemas of the oldest version of Kubernetes that is supported, and of a newer one.
VERSIONS = ("1.31", "1.34")
#: Settings that name a user; what the files hold of them is to be replaced.
USER = {"sasl.username", "sasl.password"}
#: Switches everything on, or the other way round, of what the defaults leave.
OTHER_VALUES = (
    "worker.autoscaling.enabled=true",
    "kafka.existingSecret=mine",
    "dashboard.allowFrom[0].podSelector.matchLabels.proxy=yes",
)
HELM = shutil.which("helm")

Documents = list[dict[str, Any]]


class Started(NamedTuple):
    """A program that a file starts: its name, its arguments, its environment and where it listens."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    port: int | None


def manifests() -> Documents:
    folder = DEPLOY / "kubernetes"
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert {*names, "kustomization.yaml"} == {file.name for file in folder.iterdir()}
    return [document for name in names for document in yaml.safe_load_all((folder / name).read_text())]


def rendered(*values: str) -> Documents:
    options = [f"--set={value}" for value in values]
    # A helm that `go install` built assumes a version of Kubernetes that is long gone.
    command = ["helm", "template", "demo", str(CHART), f"--kube-version={VERSIONS[0]}.0", *options]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    return [document for document in yaml.safe_load_all(text) if document is not None]


@pytest.fixture(params=["kubernetes", *(["helm", "helm-set"] if HELM else [])])
def documents(request: pytest.FixtureRequest) -> Documents:
    """What Kubernetes is given: the manifests, the chart with its own values, and with others."""
    if request.param == "kubernetes":
        return manifests()
    return rendered(*(OTHER_VALUES if request.param == "helm-set" else ()))


@pytest.fixture
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def of_kind(documents: Documents, kind: str) -> Documents:
    return [document for document in documents if document["kind"] == kind]


def pods(documents: Documents) -> Iterator[tuple[Started, dict[str, Any], dict[str, Any]]]:
    """Yield what each Deployment starts, its pod, and its container."""
    maps, secrets = (
        {one["metadata"]["name"]: one[field] for one in of_kind(documents, kind)}
        for kind, field in (("ConfigMap", "data"), ("Secret", "stringData"))
    )
    for deployment in of_kind(documents, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        environment = {one["name"]: one["value"] for one in container.get("env", ())}
        for source in container["envFrom"]:
            if "configMapRef" in source:
                environment |= maps[source["configMapRef"]["name"]]
            elif source["secretRef"]["name"] != "mine":
                environment |= secrets[source["secretRef"]["name"]]
        (port,) = [one["containerPort"] for one in container.get("ports", ())] or [None]
        yield Started(container["name"], container["args"], environment, port), pod, container


def require_started(started: Started) -> None:
    """Fail unless a started command, its options and its app exist, and it listens at the probed address."""
    options = require_command(started.arguments, started.environment)
    assert started.environment["PENSTOCK_BOOTSTRAP_SERVERS"]
    if started.arguments[0] == "run":
        app = require_app(options["target"], ROOT / "examples", started.environment)
        assert app.bootstrap_servers == started.environment["PENSTOCK_BOOTSTRAP_SERVERS"]
    if started.arguments[0] != "dashboard":
        assert options["report"], "the dashboard would not show it"
    if started.port is not None:
        assert options["http"] == f"0.0.0.0:{started.port}"


def the_worker(documents: Documents) -> Started:
    (worker,) = [one for one, _, _ in pods(documents) if one.arguments[0] == "run"]
    return worker


def test_pods_start_commands_and_apps_that_exist(documents: Documents) -> None:
    started = [one for one, _, _ in pods(documents)]

    for one in started:
        require_started(one)
        assert "PENSTOCK_CONFIG" in one.environment or not of_kind(documents, "Secret")
    assert {one.arguments[0] for one in started} == {"run", "coordinator", "dashboard"}


def test_pods_are_probed_where_they_answer(documents: Documents) -> None:
    expected = {
        "run": ("/healthz", "/healthz", "/readyz"),
        "dashboard": ("/", "/", "/"),
        # Ready when a broker answers its user: one beyond the number of partitions never is by /readyz.
        "coordinator": ("/healthz", "/healthz", ["penstock", "doctor"]),
    }
    page = Dashboard("127.0.0.1:1", Address("127.0.0.1", 0))  # never asked
    assert "/" in {route.path for route in page.routes()}  # type: ignore[attr-defined] # they are all of paths

    for one, _, container in pods(documents):
        probes = [container.get(name, {}) for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        asked = tuple(probe.get("exec", {}).get("command") or probe.get("httpGet", {}).get("path") for probe in probes)
        assert asked == expected[one.arguments[0]]
        assert all(probe["httpGet"]["port"] == container["ports"][0]["name"] for probe in probes if "httpGet" in probe)
        for probe in probes:
            if "exec" in probe:
                require_command(probe["exec"]["command"][1:], one.environment)
                assert one.environment["PENSTOCK_BOOTSTRAP_SERVERS"], "without it the command asks no broker"


def test_pods_have_time_to_drain_few_rights_and_belong_together(documents: Documents) -> None:
    stop_timeout = inspect.signature(App).parameters["stop_timeout"].default
    user = int(stage(DEPLOY / "Dockerfile")["USER"].partition(":")[0])

    for one, pod, container in pods(documents):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == user
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        if one.arguments[0] == "run":
            assert pod["terminationGracePeriodSeconds"] >= stop_timeout + 15
            assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]  # noqa: S108 - the socket of `penstock explain`
    for deployment in of_kind(documents, "Deployment"):
        spec, name = deployment["spec"], deployment["metadata"]["name"]
        labels = spec["template"]["metadata"]["labels"]
        assert labels == spec["selector"]["matchLabels"] == deployment["metadata"]["labels"]
        belonging = [one for one in documents if one is not deployment and one["metadata"]["name"] == name]
        selectors = [one["spec"].get("selector", one["spec"].get("podSelector")) for one in belonging]
        assert all(found.get("matchLabels", found) == labels for found in selectors if found is not None)
        if "prometheus.io/scrape" in spec["template"]["metadata"].get("annotations", {}):
            assert spec["strategy"]["rollingUpdate"]["maxSurge"] == 0
    (policy,) = of_kind(documents, "NetworkPolicy")
    assert all(one["from"] for one in policy["spec"]["ingress"])


@pytest.mark.parametrize("version", VERSIONS)
def test_what_kubernetes_is_given_follows_its_schemas(documents: Documents, version: str) -> None:
    for document in documents:
        if not document["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(document, version, strict=True)


def test_secrets_are_settings_of_scram_with_a_placeholder_password(documents: Documents) -> None:
    for secret in of_kind(documents, "Secret"):
        held = secret["stringData"]
        if "PENSTOCK_CONFIG" not in held:
            assert (held["username"], held["password"]) == ("CHANGE-ME", "CHANGE-ME")
            continue
        settings = client_settings_text(held["PENSTOCK_CONFIG"], "the Secret")
        assert {settings[name] for name in USER} == {"CHANGE-ME"}
        assert {name: settings[name] for name in settings.keys() - USER} == {
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "SCRAM-SHA-512",
        }


def test_the_autoscaler_follows_kedas_schema_and_the_lag_of_the_workers_group() -> None:
    documents = manifests()
    (scaled,), (authentication,) = of_kind(documents, "ScaledObject"), of_kind(documents, "TriggerAuthentication")
    (trigger,) = scaled["spec"]["triggers"]
    worker = the_worker(documents)
    app = require_app(require_command(worker.arguments, {})["target"], ROOT / "examples", {})

    # config/crd/bases/keda.sh_scaledobjects.yaml, and the page of the Kafka scaler.
    assert scaled["apiVersion"] == authentication["apiVersion"] == "keda.sh/v1alpha1"
    assert set(scaled["spec"]) <= {
        *("scaleTargetRef", "pollingInterval", "cooldownPeriod", "minReplicaCount", "maxReplicaCount"),
        *("advanced", "triggers", "fallback", "idleReplicaCount", "initialCooldownPeriod"),
    }
    assert trigger["type"] == "kafka"
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert trigger["metadata"]["consumerGroup"] == app.name
    assert trigger["metadata"]["topic"] in app.consumed
    assert trigger["metadata"]["bootstrapServers"] == worker.environment["PENSTOCK_BOOTSTRAP_SERVERS"]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    secrets = {one["metadata"]["name"]: one["stringData"] for one in of_kind(documents, "Secret")}
    for taken in authentication["spec"]["secretTargetRef"]:
        assert taken["key"] in secrets[taken["name"]]
    assert scaled["spec"]["scaleTargetRef"]["name"] in {
        one["metadata"]["name"] for one in of_kind(documents, "Deployment")
    }
    scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "orders"}}
    spec = {"minReplicas": 1, "maxReplicas": 2, "scaleTargetRef": {"kind": "Deployment", "name": "orders"}}
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    kubernetes_validate.validate({**scaler, "spec": {**spec, "behavior": behavior}}, VERSIONS[0], strict=True)


@pytest.mark.skipif(HELM is None, reason="no helm (go install helm.sh/helm/v3/cmd/helm@latest): chart only read")
def test_helm_finds_no_fault_in_the_chart() -> None:
    subprocess.run(["helm", "lint", "--strict", str(CHART)], check=True, timeout=60)

    kinds = {(one["kind"], one["metadata"]["name"]) for one in rendered(*OTHER_VALUES)}
    assert ("HorizontalPodAutoscaler", "demo-worker") in kinds
    assert "Secret" not in {kind for kind, _ in kinds}
    only_worker = rendered("coordinator.enabled=false", "dashboard.enabled=false")
    assert {one["kind"] for one in only_worker} == {"Deployment", "PodDisruptionBudget", "Secret"}


def test_the_templates_of_the_chart_use_all_its_values_and_no_others() -> None:
    chart, values = (yaml.safe_load((CHART / name).read_text()) for name in ("Chart.yaml", "values.yaml"))
    texts = {file.name: file.read_text() for file in (CHART / "templates").iterdir()}
    text = "\n".join(texts.values())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))

    assert chart["apiVersion"] == "v2"
    assert chart["name"] == CHART.name
    assert re.fullmatch(r"\d+\.\d+\.\d+", chart["version"])
    for path in used:
        found = values
        for name in path.split("."):
            found = found[name]
    unused = {path for path in leaves(values) if not any(path == one or path.startswith(f"{one}.") for one in used)}
    assert unused == set()
    defined = re.findall(r'define "([^"]+)"', text)
    assert set(re.findall(r'include "([^"]+)"', text)) == set(defined)
    assert len(defined) == len(set(defined))
    for name, template in texts.items():
        actions = re.findall(r"\{\{-? *(if|with|range|define|end)\b", template)
        assert actions.count("end") * 2 == len(actions), name


def leaves(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def test_the_chart_starts_what_the_manifests_start() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    worker = the_worker(manifests())
    options, of_image = (require_command(one, {}) for one in (worker.arguments, command_of(DEPLOY / "Dockerfile")))

    assert values["worker"]["app"] == options["target"] == of_image["target"]
    assert values["worker"]["handlerLimit"] == options["handler_limit"]
    assert values["kafka"]["bootstrapServers"] == worker.environment["PENSTOCK_BOOTSTRAP_SERVERS"]
    assert values["kafka"]["config"] == worker.environment["PENSTOCK_CONFIG"]


def test_the_services_of_compose_exist_are_checked_and_wait_for_each_other(compose: dict[str, Any]) -> None:
    services = compose["services"]
    image = stage(DEPLOY / "Dockerfile")

    assert set(services) == {"kafka", "postgres", "feed", "worker", "coordinator", "dashboard"}
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for needed, how in service.get("depends_on", {}).items():
            has_check = {"test", "disable"} & set(services[needed].get("healthcheck", {})) == {"test"}
            assert how["condition"] == ("service_healthy" if has_check else "service_completed_successfully")
        if "build" not in service:
            continue
        build = service["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
        if "entrypoint" in service:
            assert (ROOT / "examples" / service["entrypoint"][-1]).is_file()
            assert f'"{service["command"][0]}"' in (ROOT / "examples" / service["entrypoint"][-1]).read_text()
            continue
        ports = [int(port.rpartition(":")[2]) for port in service.get("ports", ())] or [None]
        started = Started(name, service["command"], service["environment"], ports[0])
        require_started(started)
        check = service.get("healthcheck", {}).get("test")
        if check is None:
            assert "/healthz" in image["HEALTHCHECK"], "of the image, which a worker alone has"
            assert name == "worker"
        elif check[1] == "penstock":
            require_command(check[2:], started.environment)
        else:
            assert check[:3] == ["CMD", "python", "-c"]
            ast.parse(check[3])
            assert f"127.0.0.1:{ports[0]}/'" in check[3]


def test_compose_has_one_kafka_in_kraft_mode_and_the_store_of_its_coordinator(compose: dict[str, Any]) -> None:
    kafka, postgres, coordinator = (compose["services"][name] for name in ("kafka", "postgres", "coordinator"))
    settings = kafka["environment"]
    names = [one.partition("://")[0] for one in settings["KAFKA_LISTENERS"].split(",")]
    advertised = dict(one.split("://") for one in settings["KAFKA_ADVERTISED_LISTENERS"].split(","))
    user = postgres["environment"]

    # The client's tests run with this version.
    assert kafka["image"] == f"apache/kafka:{KAFKA_VERSION}"
    assert settings["KAFKA_PROCESS_ROLES"] == "broker,controller"
    assert {one.partition(":")[0] for one in settings["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")} == set(names)
    assert advertised["INTERNAL"] == coordinator["environment"]["PENSTOCK_BOOTSTRAP_SERVERS"]
    assert kafka["ports"] == [f"{advertised['HOST']}:{advertised['HOST'].rpartition(':')[2]}"]
    assert kafka["healthcheck"]["test"][-1] == advertised["INTERNAL"]
    url = f"postgresql+psycopg://{user['POSTGRES_USER']}@postgres/{user['POSTGRES_DB']}"
    assert require_command(coordinator["command"], coordinator["environment"])["sql"] == url
    assert url in coordinator["healthcheck"]["test"]
    assert coordinator["environment"]["PGPASSWORD"] == user["POSTGRES_PASSWORD"]
