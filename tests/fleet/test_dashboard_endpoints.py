"""The endpoints of one process, asked over HTTP while its app starts, works, hangs, loses its broker and stops."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from reverse_proxy import free_port

from kafka_proxy import KafkaProxy
from kafka_tools import produce
from penstock import App, ConfigurationError, Telemetry
from penstock.devbroker import DevBroker
from penstock.fleet import Address, AppEndpoints, HealthLimits
from waiting import wait_until

ANY = Address("127.0.0.1", 0)


def get(endpoints: AppEndpoints, path: str, **headers: str) -> tuple[int, str]:
    """Return status and body."""
    connection = http.client.HTTPConnection(endpoints.address.host, endpoints.address.port, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def asked(endpoints: AppEndpoints, path: str) -> tuple[int, dict[str, Any]]:
    status, body = get(endpoints, path)
    return status, json.loads(body)


def reasons(endpoints: AppEndpoints, path: str) -> str:
    """Return why not, and nothing where all is well."""
    status, said = asked(endpoints, path)
    assert status == (503 if said["reasons"] else 200)
    return "; ".join(said["reasons"])


@contextmanager
def serving(app: App, **limits: float) -> Iterator[AppEndpoints]:
    with AppEndpoints(app, ANY, HealthLimits(**limits)) as endpoints:
        yield endpoints


def test_a_process_lives_while_it_starts_is_ready_with_its_partitions_and_says_that_it_stops(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(2)
    reader = InMemoryMetricReader()
    telemetry = Telemetry(meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, telemetry=telemetry)
    begun, go_on = threading.Event(), threading.Event()

    @app.handler(topic)
    def handle(message: object) -> None:
        begun.set()
        assert go_on.wait(300)

    with serving(app) as endpoints:
        assert asked(endpoints, "/healthz") == (200, {"status": "alive", "reasons": []})
        assert asked(endpoints, "/readyz") == (503, {"status": "not ready", "reasons": ["the app is starting"]})

        with app.start() as running:
            endpoints.watch(running)
            wait_until(lambda: not reasons(endpoints, "/readyz"))
            produce(broker.bootstrap_servers, topic, [(b"the key", b"the value")])
            assert begun.wait(60)
            _, shown = get(endpoints, "/metrics")
            exported = reader.get_metrics_data()

            stopping = threading.Thread(target=running.stop)
            stopping.start()
            wait_until(lambda: reasons(endpoints, "/readyz") == "the app is stopping")
            assert reasons(endpoints, "/healthz") == ""
            go_on.set()
            stopping.join(60)
        assert reasons(endpoints, "/healthz") == ""

    assert f'penstock_in_flight_messages{{messaging_consumer_group_name="{topic}"}} 1.0' in shown
    assert "process_cpu_seconds_total" in shown
    assert "the key" not in shown
    # Its own provider exports as before.
    assert exported is not None
    assert "penstock.in_flight" in str(exported.to_json())
    with pytest.raises(OSError, match="refused"):
        get(endpoints, "/healthz")


def test_a_handler_that_hangs_fails_healthz_which_names_it_and_readyz_where_nothing_else_is_done(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(1)
    produce(broker.bootstrap_servers, topic, [(b"secret key", b"v")] * 3)
    app = App(topic, bootstrap_servers=broker.bootstrap_servers)
    go_on = threading.Event()

    @app.handler(topic)
    def hang(message: object) -> None:
        go_on.wait(300)

    with serving(app, handler=0.5, moving=0.5) as endpoints, app.start() as running:
        endpoints.watch(running)
        hung = wait_until(lambda: reasons(endpoints, "/healthz"))
        stuck = wait_until(lambda: reasons(endpoints, "/readyz").partition("nothing was done for ")[2])
        go_on.set()
        wait_until(lambda: not reasons(endpoints, "/healthz") and not reasons(endpoints, "/readyz"))

    assert hung.startswith(f"{topic}:0@0 has been in ")
    assert "hang for " in hung
    assert f"on penstock-worker-{topic}-" in hung
    assert hung.endswith("the limit is 0.5 s")
    assert "held by offset 0, in handler " in stuck
    assert "secret" not in hung + stuck


@pytest.mark.thorough
def test_a_broker_that_is_gone_makes_a_process_unready_and_is_no_reason_to_restart_it(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(1)
    with ExitStack() as reachable:
        proxy = reachable.enter_context(KafkaProxy(broker.bootstrap_servers))
        app = App(topic, bootstrap_servers=proxy.bootstrap_servers, revoke_timeout=0.5, stop_timeout=1)
        app.handler(topic)(lambda _: None)
        with serving(app) as endpoints, app.start() as running:
            endpoints.watch(running)
            wait_until(lambda: not reasons(endpoints, "/readyz"))

            reachable.close()

            why = wait_until(lambda: reasons(endpoints, "/readyz"), 60)
            assert reasons(endpoints, "/healthz") == ""

    # Its partition stands still, or was lost because the session has ended.
    assert topic in why
    assert "brokers" in why or "Connection refused" in why


def test_metrics_that_hang_hold_neither_healthz_nor_the_end_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App("nothing", bootstrap_servers="127.0.0.1:1")
    go_on = threading.Event()
    monkeypatch.setattr("penstock.fleet.probes.endpoints._COLLECT_S", 0.2)
    monkeypatch.setattr("penstock.fleet.probes.metrics.PrometheusMetrics.text", lambda *_: go_on.wait(60))

    with serving(app) as endpoints:
        status, body = get(endpoints, "/metrics")
        assert asked(endpoints, "/healthz")[0] == 200
    go_on.set()

    assert (status, body) == (503, "the metrics did not come within 0.2 s\n")


def test_a_page_of_another_site_reads_nothing_and_an_address_that_is_taken_is_said() -> None:
    app = App("nothing", bootstrap_servers="127.0.0.1:1")
    with serving(app) as endpoints:
        assert get(endpoints, "/metrics", Host="evil.example:8400")[0] == 403
        assert get(endpoints, "/healthz", Host="localhost:8400")[0] == 200
        assert get(endpoints, "/else")[0] == 404
        connection = http.client.HTTPConnection(endpoints.address.host, endpoints.address.port, timeout=20)
        connection.request("POST", "/healthz")
        assert connection.getresponse().status == 405
        connection.close()
        with pytest.raises(ConfigurationError, match=f"cannot listen on {endpoints.address}: "):
            AppEndpoints(app, endpoints.address)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8400", "127.0.0.1", 8400, True),
        ("[::1]:0", "::1", 0, True),
        ("localhost:1", "localhost", 1, True),
        ("worker-1:65535", "worker-1", 65535, False),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text)

    assert (address.host, address.port, address.is_loopback, str(address)) == (host, port, loopback, text)


@pytest.mark.parametrize(
    "text", ["", "8400", ":8400", "127.0.0.1", "a b:1", "host:65536", "::1:8400", "host:٣", "h:1\n"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        Address.parse(text)


def test_each_member_process_listens_on_the_next_port(monkeypatch: pytest.MonkeyPatch) -> None:
    address = Address.parse("127.0.0.1:8400")

    assert address.of_this_process().port == 8400
    monkeypatch.setenv("PENSTOCK_PROCESS", "3")
    assert address.of_this_process().port == 8402
    assert ANY.of_this_process().port == 0
    with pytest.raises(ConfigurationError, match="65536"):
        Address("127.0.0.1", 65_534).of_this_process()


def test_a_coordinator_is_probed_and_scraped_and_shows_its_page(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    prefix, address = f"store.{new_topic()}", Address("127.0.0.1", free_port())
    command = [sys.executable, "-m", "penstock", "coordinator", f"--bootstrap-servers={broker.bootstrap_servers}"]
    running = subprocess.Popen([*command, f"--prefix={prefix}", f"--http={address}"])

    def ask(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            assert running.poll() is None
            return 0, str(error)

    try:
        wait_until(lambda: ask("/readyz")[0] == 200, 120)
        alive, metrics, state = ask("/healthz"), ask("/metrics"), ask("/api/groups")
    finally:
        running.terminate()
        code = running.wait(60)

    assert json.loads(alive[1]) == {"status": "alive", "reasons": []}
    assert f'penstock_transactions_pending{{penstock_transactions_prefix="{prefix}"}} 0.0' in metrics[1]
    assert [group["name"] for group in json.loads(state[1])["groups"]] == [f"{prefix}.coordinator"]
    assert code == 0
