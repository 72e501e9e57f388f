"""The page in a real browser: its content, planted scripts, keyboard, phone, and its actions."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from action_tools import TOKEN
from playwright.sync_api import expect
from reverse_proxy import free_port, proxied
from scenes import Scene, alone, planted, serving

from kafka_tools import produce
from penstock import App
from penstock.devbroker import DevBroker
from penstock.fleet import Address, AppEndpoints
from penstock.fleet.actions.dispatch import ActionContext
from penstock.fleet.actions.endpoints import routes
from penstock.fleet.commands.audit import Answer
from penstock.fleet.commands.command import Command
from penstock.fleet.reports.group_state import Group
from penstock.fleet.server import Visitors
from penstock.fleet_member import Outcome
from penstock.transactions import new_id

if TYPE_CHECKING:
    from playwright.sync_api import Page

OpenPage = Callable[..., "Page"]

PLANTED = [
    "<script>window.ran=1</script>",
    '<img src=x onerror="window.ran=1">',
    '"><svg onload="document.title=\'ran\'">',
    "javascript:window.ran=1",
    "'; DROP TABLE orders; --",
    "\r\nSet-Cookie: a=b",
    "\x1b[2J\x1b]0;ran\x07",
    "\u202egnp.exe\u2066",
    "{{constructor.constructor('return 1')()}}",
    "half \ud83d pair",
]


def test_what_is_planted_in_names_keys_and_errors_is_text_and_runs_nowhere(open_page: OpenPage) -> None:
    def read(*_: object) -> dict[str, Any]:
        text = "".join(PLANTED[:8])
        return {"key": text, "value": text, "bytes": 3, "timestamp": 1, "headers": [[text, text]]}

    scene = Scene(lambda: [planted(text) for text in PLANTED])
    scene.ignored, scene.trouble = {PLANTED[0]: 3}, PLANTED[0]
    with serving(scene, read_message=read) as url:
        page = open_page(url)
        expect(page.get_by_role("heading", name="All groups")).to_be_visible()
        shown = page.inner_text("body")
        for text in PLANTED[:3]:
            # Loading the page for each text took minutes on a busy machine.
            page.evaluate("text => { location.hash = '#/' + encodeURIComponent(text); }", text)
            expect(page.get_by_role("heading", level=1)).to_contain_text(text[:6])
            page.get_by_role("button", name="Details").first.dispatch_event("click")
            page.get_by_role("button", name="Show the message").dispatch_event("click")
            expect(page.locator("#message pre")).to_contain_text("DROP TABLE")
            assert page.evaluate("window.ran") is None
            assert page.locator("main, dialog").locator("script, img, iframe, [onload], [onerror]").count() == 0
            page.evaluate("document.getElementById('dialog').close()")

    for text in PLANTED[:5]:
        assert text in shown
    for character in "\x1b\x07\u202e\u2066":
        assert character not in shown
    assert "\\u202egnp.exe" in shown
    assert "\\u001b[2J" in shown


def test_from_a_group_to_the_cause_in_two_clicks_and_no_button_unless_asked_for(open_page: OpenPage) -> None:
    with serving(Scene()) as url:
        page = open_page(url)
        page.get_by_role("link", name="shop", exact=True).click()
        # Actions are off.
        expect(page.get_by_role("button", name=re.compile("Pause|Give up|Stacks|Set offsets"))).to_have_count(0)
        page.locator("li", has_text="waits for its handler").get_by_role("button", name="Details").click()

        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Offset 48262, in handler charge on penstock-worker-shop-3 for 74.2 s")
        expect(dialog).to_contain_text("Key and payload are hidden")


def test_keys_lead_through_the_page_and_a_broker_and_a_dashboard_that_are_gone_are_shown(open_page: OpenPage) -> None:
    scene = Scene()
    with serving(scene) as url:
        page = open_page(url)
        mailer = page.get_by_role("link", name="mailer", exact=True)
        expect(mailer).to_be_visible()
        page.keyboard.press("/")
        page.keyboard.type("shop")
        expect(mailer).to_have_count(0)
        page.keyboard.press("Escape")
        expect(mailer).to_be_visible()
        mailer.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1, name="mailer")).to_be_visible()
        page.locator("body").press("Escape")
        expect(page.get_by_role("heading", name="All groups")).to_be_visible()

        expect(page.get_by_text("live", exact=True)).to_be_visible()
        scene.trouble = "no broker answers"
        expect(page.get_by_role("alert")).to_contain_text("no broker answers")
    expect(page.get_by_text("The dashboard does not answer")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.thorough)])
def test_a_phone_shows_all_without_scrolling_sideways_in_light_and_dark(open_page: OpenPage, scheme: str) -> None:
    sizes = []
    with serving(Scene()) as url:
        page = open_page(url, width=380, scheme=scheme)
        for where, title in (("", "All groups"), ("shop", "shop"), ("lake", "lake"), ("shop/vm-7f22-1c", "vm-7f22-1c")):
            page.goto(f"{url}/#/{where}")
            expect(page.get_by_role("heading", name=title).first).to_be_visible()
            expect(page.locator("dl.tiles")).to_be_visible()
            if where == "lake":
                expect(page.get_by_role("heading", name="Batches of orders_to_lake")).to_be_visible()
            size = "[document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
            sizes.append(page.evaluate(size))

    assert all(width <= 380 for width, _ in sizes)
    assert all((colour == "rgb(15, 21, 27)") == (scheme == "dark") for _, colour in sizes)


IDS = {name: new_id() for name in ("kafka", "sql", "file")}


def stores() -> list[Group]:
    """Return three coordinators: of a store in Kafka, one that listens for commands, and one that does not."""
    hears = {"store": "other", "group": "sql", "member": "vm-1"}
    found = []
    for name, operator in (("kafka", {"store": "kafka"}), ("sql", hears), ("file", {"store": "other"})):
        pending = {"id": IDS[name], "prefix": name, "group": "shop", "topics": "orders", "age": 9.0, "checks": 1}
        coordinator = {"counts": {"pending": 1}, "waits": [], "transactions": [pending], "operator": operator}
        found.append(alone(name, coordinator=coordinator, commands="group" in operator))
    return found


def test_an_action_asks_for_the_token_then_once_more_and_names_what_was_done_and_who_settles_transactions(
    open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Command]] = []

    def plan(command: Command, _: object) -> Answer:
        asked.append(("would", command))
        return Answer(Outcome.DONE, f"would {command.name} <b>{command.place}</b>")

    def perform(command: Command, _: object) -> Answer:
        asked.append(("done", command))
        if command.name == "give-up":
            return Answer(Outcome.REFUSED, "payments:1@48228 is in its handler")
        return Answer(Outcome.DONE, "paused orders in 2 members")

    monkeypatch.setattr("penstock.fleet.actions.endpoints.plan", plan)
    monkeypatch.setattr("penstock.fleet.actions.endpoints.perform", perform)
    actions, shop = routes(ActionContext("127.0.0.1:1"), TOKEN), Scene()
    given_up = {"group": "shop", "member": "vm-7f22-1c", "topic": "payments", "partition": 1, "offset": 48_228}
    coordinator = {"group": "sql", "member": "vm-1"}
    with serving(Scene(lambda: [*shop.groups(), *stores()]), actions=actions) as url:
        page = open_page(f"{url}/#/shop")
        page.get_by_role("button", name="Pause …").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Topic").select_option("orders")
        for token, said in (("wrong", "the token is wrong"), (TOKEN, "would pause <b>orders</b>")):
            dialog.get_by_label("Token").fill(token)
            dialog.get_by_role("button", name="Go on").click()
            expect(dialog).to_contain_text(said)
        assert len(asked) == 1
        dialog.get_by_role("button", name="Pause").click()
        expect(dialog).to_contain_text(re.compile("done.*paused orders in 2 members"))
        dialog.get_by_role("button", name="Close").click()

        page.locator("li", has_text="payments:1 waits for a parked key").get_by_role("button", name="Give up").click()
        expect(dialog).to_contain_text("would give-up")
        dialog.get_by_role("button", name="Give up").click()
        expect(dialog).to_contain_text("payments:1@48228 is in its handler")
        page.keyboard.press("Escape")

        for name in ("kafka", "sql"):
            page.goto(f"{url}/#/{name}")
            row = page.locator("tr", has_text=IDS[name])  # until it comes, the former group is shown
            row.get_by_role("button", name="Settle …").click()
            dialog.get_by_label("Decision").select_option("commit")
            dialog.get_by_role("button", name="Go on").click()
            expect(dialog).to_contain_text("would settle")
            page.keyboard.press("Escape")
            expect(dialog).not_to_be_visible()
            expect(page.get_by_role("button", name=re.compile("Resume a discarded one …|Stacks"))).to_have_count(1)
        page.goto(f"{url}/#/file")
        expect(page.locator("tr", has_text=IDS["file"])).to_be_visible()
        assert page.get_by_role("button", name=re.compile("Settle|Resume")).count() == 0

    assert [(how, command.name, command.all_parameters) for how, command in asked[1:]] == [
        ("done", "pause", {"group": "shop", "topic": "orders"}),
        ("would", "give-up", given_up),
        ("done", "give-up", given_up),
        ("would", "settle", {"prefix": "kafka", "transaction_id": IDS["kafka"], "decision": "commit"}),
        ("would", "settle", {**coordinator, "transaction_id": IDS["sql"], "decision": "commit"}),
    ]


def test_behind_a_proxy_under_a_path_the_page_and_its_actions_work_where_its_address_is_given(
    open_page: OpenPage, tmp_path: Path
) -> None:
    port = free_port()
    asks = """dry => fetch('api/actions/pause', {method: 'POST', body: JSON.stringify({group: 'shop', topic: 'orders',
        dry_run: true}), headers: {'Content-Type': 'application/json', Authorization: 'Bearer ' + dry}}
        ).then(async answer => [answer.status, (await answer.json()).said])"""
    answers = []
    for public_url in (f"http://127.0.0.1:{port}/penstock/", None):
        visitors = Visitors(is_loopback=True, public_url=public_url)
        actions = routes(ActionContext("127.0.0.1:1"), TOKEN, visitors)
        with serving(Scene(), visitors=visitors, actions=actions) as behind, proxied(behind, port, tmp_path) as url:
            page = open_page(f"{url}#/shop")
            expect(page.get_by_role("heading", name="shop")).to_be_visible()
            expect(page.locator("header img")).to_have_js_property("complete", value=True)
            answers.append(page.evaluate(asks, TOKEN))

    assert (answers[0][0], "would" in answers[0][1]) == (200, True)
    assert (answers[1][0], "--public-url" in answers[1][1]) == (403, True)


def test_one_process_shows_itself_and_the_message_in_its_way_to_whom_that_is_switched_on(
    broker: DevBroker, new_topic: Callable[..., str], open_page: OpenPage
) -> None:
    topic, go_on = new_topic(), threading.Event()
    app = App(topic, bootstrap_servers=broker.bootstrap_servers)

    @app.handler(topic)
    def pack(_message: object) -> None:
        assert go_on.wait(120)

    with AppEndpoints(app, Address("127.0.0.1", 0), show_messages=True) as endpoints:
        page = open_page(f"http://{endpoints.address}/#/{topic}")
        with app.start() as started:
            endpoints.watch(started)
            produce(broker.bootstrap_servers, topic, [(b"<b>the key</b>", b"\x1b[2Jthe value")])
            try:
                expect(page.get_by_text("offset 0, in handler")).to_be_visible()
                page.get_by_role("button", name=f"{topic}:0").click()
                page.get_by_role("button", name="Show the message").click()
                expect(page.locator("#message")).to_contain_text("<b>the key</b>")
                expect(page.locator("#message pre")).to_have_text("\\u001b[2Jthe value")
                page.get_by_role("button", name="Show the stack").click()
                expect(page.locator("#message pre")).to_contain_text("in pack")
            finally:
                go_on.set()
