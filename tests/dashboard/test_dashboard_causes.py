"""The page over real brokers: the true cause of every stall, within ten seconds; forged reports; rights; secrets."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient
from playwright.sync_api import expect

import canary
from kafka_proxy import KafkaProxy
from kafka_tools import produce
from penstock import App, clients
from penstock.dashboard import Address, Dashboard, Endpoints
from penstock.devbroker import DevBroker, User
from penstock.reports.report import Sender, encode_report
from rights import give, on_topic
from stalls import APP, open_transaction, running
from waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

ANY = Address("127.0.0.1", 0)
#: Seconds within which a cause is to be named.
NAMED_S = 10.0


def state(page: Dashboard | Endpoints, query: str = "") -> Any:
    with urllib.request.urlopen(f"http://{page.address}/api/groups{query}", timeout=20) as answer:
        return json.load(answer)


def test_the_page_names_the_true_causes_of_five_stalls_within_ten_seconds(
    broker: DevBroker,
    admin: AdminClient,
    new_topic: Callable[..., str],
    tmp_path: Path,
    open_page: Callable[..., Page],
) -> None:
    hung, poison, refused, held_back, letters = (new_topic() for _ in range(5))
    reports = f"reports-{os.getpid()}-page"
    names = {"hung": hung, "poison": poison, "refused": refused, "held_back": held_back, "letters": letters}
    text = APP.format(name=hung, servers=broker.bootstrap_servers, reports=reports, **names)
    (tmp_path / "shop.py").write_text(text)
    with (
        running(tmp_path),
        Dashboard(broker.bootstrap_servers, ANY, topic=reports) as dashboard,
        ExitStack() as ends,
        ExitStack() as reachable,
    ):
        proxy = reachable.enter_context(KafkaProxy(broker.bootstrap_servers))
        cut_off = ends.enter_context(Dashboard(proxy.bootstrap_servers, ANY, topic=reports))
        for one in (dashboard, cut_off):
            wait_until(lambda one=one: [group["partitions"] for group in state(one)["groups"]] == [4], 90)
        page, alone = open_page(f"http://{dashboard.address}"), open_page(f"http://{cut_off.address}")
        # First click: from all groups to the one that stands.
        page.get_by_role("link", name=hung, exact=True).first.click()
        expect(page.get_by_role("heading", level=1, name=hung)).to_be_visible()
        for future in admin.delete_topics([letters]).values():
            future.result()
        wait_until(lambda: letters not in admin.list_topics(timeout=30).topics)

        for topic, key in ((hung, b"hung key"), (poison, b"poison key"), (refused, b"refused key")):
            produce(broker.bootstrap_servers, topic, [(key, b"a secret payload")])
        took = {}
        with open_transaction(broker.bootstrap_servers, held_back):
            begun = time.monotonic()
            for cause in (
                f"Handler hangs has had offset 0 for .* on penstock-worker-{hung}-",
                "Handler fails failed once at offset 0: its key is parked, and the next try is in ",
                f"A message was given up: .*{letters}",
                f"A transaction that another producer began is open at offset 0.*--topic {held_back} --partition 0",
            ):
                expect(page.locator("li .why", has_text=re.compile(cause))).to_be_visible(timeout=60_000)
                took[cause] = time.monotonic() - begun
        begun = time.monotonic()
        reachable.close()
        expect(alone.get_by_role("alert")).to_contain_text("Nothing newer is known", timeout=60_000)
        took["the broker is gone"] = time.monotonic() - begun

        # Second click: the cause in full, with the handler's stack.
        page.locator("li", has_text="Handler hangs").get_by_role("button", name="Details").click()
        expect(page.get_by_role("dialog")).to_contain_text("time.sleep(0.02)")
        shown = page.inner_text("body") + page.content()

    assert max(took.values()) < NAMED_S, took
    assert not [one for one in ("hung key", "poison key", "secret") if one in shown]


def test_one_process_shows_itself_and_the_message_in_its_way_to_whom_that_is_switched_on(
    broker: DevBroker, new_topic: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    topic, go_on = new_topic(), threading.Event()
    app = App(topic, bootstrap_servers=broker.bootstrap_servers)

    @app.handler(topic)
    def pack(_message: object) -> None:
        assert go_on.wait(120)

    with Endpoints(app, ANY, show_messages=True) as endpoints:
        page = open_page(f"http://{endpoints.address}/#/{topic}")
        with app.start() as started:
            endpoints.watch(started)
            produce(broker.bootstrap_servers, topic, [(b"<b>the key</b>", b"\x1b[2Jthe value")])
            try:
                expect(page.get_by_text("offset 0, in handler")).to_be_visible(timeout=60_000)
                page.get_by_role("button", name=f"{topic}[0]").click()
                page.get_by_role("button", name="Show the message").click()
                expect(page.locator("#message")).to_contain_text("<b>the key</b>")
                expect(page.locator("#message pre")).to_have_text("\\u001b[2Jthe value")
            finally:
                go_on.set()


def test_forged_reports_break_nothing(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    topic, sender = new_topic(), Sender("shop", "one", "host", 1)
    numbers = {"sequence": 1, "interval_s": 2.0, "uptime_s": 1.0}
    valid = encode_report(sender, {"counts": {"handled": 3}}, {}, numbers)
    wrong = [b"", b"null", b"[]", b"{}", b"\xff", b'{"version":99}', b"[" * 100_000, valid.replace(b'"one"', b'"two"')]
    for name, value in (
        ("lanes", {"h": {"depth": [1], "age": []}}),
        ("latencies", {"done": ["x"]}),
        ("transactions", 7),
    ):
        wrong.append(json.dumps({**json.loads(valid), name: value}).encode())
    with Dashboard(broker.bootstrap_servers, ANY, topic=topic) as dashboard:
        produce(broker.bootstrap_servers, topic, [(sender.key, value) for value in wrong])
        produce(broker.bootstrap_servers, topic, [(sender.key, valid)])
        told = wait_until(lambda: (found := state(dashboard))["groups"] and found, 60)

    assert [one["name"] for one in told["groups"]] == ["shop"]
    assert told["ignored"] == {"unreadable": len(wrong) - 1, "newer version": 1}


def test_on_a_secured_cluster_it_needs_read_and_describe_on_the_topic_of_reports_and_no_more(
    secured: DevBroker, new_secured_topic: Callable[..., str], new_user: Callable[..., User]
) -> None:
    topic, sender = new_secured_topic(), Sender("shop", "one", "host", 1)
    value = encode_report(sender, {}, {}, {"sequence": 1, "interval_s": 2.0, "uptime_s": 1.0})
    producer = clients.producer(secured.bootstrap_servers, secured.admin_config)
    producer.produce(topic, value, key=sender.key)
    assert producer.flush(60) == 0
    user = new_user()
    with Dashboard(secured.bootstrap_servers, ANY, config=user.config, topic=topic) as dashboard:
        denied = wait_until(lambda: topic in (said := state(dashboard)["trouble"] or "") and said, 60)
        give(secured, user, on_topic(topic, "Read"))
        wait_until(lambda: [one["name"] for one in state(dashboard)["groups"]] == ["shop"], 60)
        told = state(dashboard)
        details = state(dashboard, "?group=shop")

    assert canary.PASSWORD not in json.dumps([denied, told, details])
    assert "may not" in denied or "--operation" in denied, denied
    assert told["trouble"] is None
