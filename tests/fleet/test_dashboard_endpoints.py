"""The endpoints of one process, asked over HTTP while its app starts, works, hangs, loses its broker and stops."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from action_tools import reasons, request
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from reverse_proxy import free_port

from kafka_tools import produce
from penstock import App, ConfigurationError, Telemetry
from penstock.devbroker import DevBroker
from penstock.fleet import Address, AppEndpoints, HealthLimits
from waiting import wait_until

ANY = Address("127.0.0.1", 0)


def test_a_process_starts_works_hangs_at_a_handler_that_is_named_goes_on_and_stops(
    broker: DevBroker, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.fleet.page.hub.STEP_S", 0.1)
    topic = new_topic(1)
    reader = InMemoryMetricReader()
    telemetry = Telemetry(meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, telemetry=telemetry)
    go_on = threading.Event()

    @app.handler(topic)
    def hang(message: object) -> None:
        assert go_on.wait(300)

    with AppEndpoints(app, ANY, HealthLimits(handler=0.5, moving=0.5)) as endpoints:
        assert request(endpoints.address, "/healthz").content == {"status": "alive", "reasons": []}
        starting = {"status": "not ready", "reasons": ["the app is starting"]}
        assert request(endpoints.address, "/readyz").content == starting

        with app.start() as running:
            endpoints.watch(running)
            wait_until(lambda: not reasons(endpoints, "/readyz"))
            produce(broker.bootstrap_servers, topic, [(b"the key", b"the value")])
            hung = wait_until(lambda: reasons(endpoints, "/healthz"))
            stuck = wait_until(lambda: reasons(endpoints, "/readyz").partition("no message was done for ")[2])
            stacks = wait_until(lambda: request(endpoints.address, "/api/stacks").content)
            proxied = request(endpoints.address, "/api/stacks", X_Forwarded_For="10.0.0.1")
            shown = request(endpoints.address, "/metrics").text
            exported = reader.get_metrics_data()
            go_on.set()
            wait_until(lambda: not reasons(endpoints, "/healthz") and not reasons(endpoints, "/readyz"))

            go_on.clear()
            produce(broker.bootstrap_servers, topic, [(b"the key", b"the value")])
            wait_until(lambda: running.statistics().busy_workers)
            stopping = threading.Thread(target=running.stop)
            stopping.start()
            wait_until(lambda: reasons(endpoints, "/readyz") == "the app is stopping")
            stopping.join(1)
            state = f"/api/groups?group={topic}"
            # A process knows its own state while it stops; the lag is unknown while no broker answers.
            wait_until(lambda: request(endpoints.address, state).content["history"]["series"]["lag"][-1] is not None)
            go_on.set()
            stopping.join(60)
        assert reasons(endpoints, "/healthz") == ""

    assert (hung.startswith(f"{topic}:0@0 has been in "), "hang for " in hung) == (True, True)
    assert f"on penstock-worker-{topic}-" in hung
    assert hung.endswith("the limit is 0.5 s")
    assert "held by offset 0, in handler " in stuck
    assert f'penstock_in_flight_messages{{messaging_consumer_group_name="{topic}"}} 1.0' in shown
    assert "process_cpu_seconds_total" in shown
    assert (f'File "{__file__}", line ' in str(stacks), "go_on" in str(stacks), proxied.status) == (True, False, 403)
    assert "the key" not in hung + stuck + shown
    # Its own provider exports as before.
    assert "penstock.in_flight" in str(exported and exported.to_json())
    with pytest.raises(OSError, match="refused"):
        request(endpoints.address, "/healthz")


def test_a_page_of_another_site_reads_nothing_and_metrics_that_hang_hold_neither_healthz_nor_the_end_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App("nothing", bootstrap_servers="127.0.0.1:1")
    go_on = threading.Event()
    monkeypatch.setattr("penstock.fleet.probes.endpoints._COLLECT_S", 0.2)
    monkeypatch.setattr("penstock.fleet.probes.metrics.PrometheusMetrics.text", lambda *_: go_on.wait(60))

    with AppEndpoints(app, ANY) as endpoints:
        assert request(endpoints.address, "/metrics", Host="evil.example:8400").status == 403
        answer = request(endpoints.address, "/metrics")
        assert request(endpoints.address, "/healthz", Host="localhost:8400").status == 200
        assert request(endpoints.address, "/else").status == 404
        assert request(endpoints.address, "/healthz", {}).status == 405
        with pytest.raises(ConfigurationError, match=f"cannot listen on {endpoints.address}: "):
            AppEndpoints(app, endpoints.address)
    with AppEndpoints(app, Address("0.0.0.0", 0)) as endpoints:  # noqa: S104 - other machines can reach it
        assert request(f"127.0.0.1:{endpoints.address.port}", "/api/stacks").status == 403
    go_on.set()

    assert (answer.status, answer.text) == (503, '{"said": "the metrics did not arrive within 0.2 s; try again"}\n')


def test_a_probe_that_cannot_judge_fails_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = App("nothing", bootstrap_servers="127.0.0.1:1")
    for name in ("alive", "ready"):
        monkeypatch.setattr(f"penstock.fleet.probes.health.Health.{name}", lambda _: 1 // 0)

    with AppEndpoints(app, ANY) as endpoints:
        answers = [request(endpoints.address, path) for path in ("/healthz", "/readyz")]

    assert [answer.status for answer in answers] == [503, 503]
    assert [answer.content for answer in answers] == [
        {"status": status, "reasons": ["the state could not be read; the log has the reason"]}
        for status in ("hung", "not ready")
    ]
    assert caplog.text.count("the process could not be judged") == 2


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

    def is_ready() -> bool:
        assert running.poll() is None
        with suppress(OSError):
            return request(address, "/readyz").status == 200
        return False

    try:
        wait_until(is_ready, 120)
        paths = ("/healthz", "/metrics", f"/api/groups?group={prefix}.coordinator")
        alive, metrics, page = (request(address, path) for path in paths)
    finally:
        running.terminate()
        code = running.wait(60)

    assert alive.content == {"status": "alive", "reasons": []}
    assert f'penstock_transactions_pending{{penstock_transactions_prefix="{prefix}"}} 0.0' in metrics.text
    [coordinator] = page.content["group"]["coordinators"]
    assert coordinator["operator"] == {"store": "kafka"}, "it hears no commands, for it was not asked to"
    assert code == 0
