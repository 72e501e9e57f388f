"""The page's addresses over HTTP: their answers, their readers, and the cost of browsers."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from action_tools import request
from scenes import Scene, alone, partition, serving

from penstock.errors import PenstockError
from waiting import wait_until


def state(url: str, after: object = 0.0) -> dict[str, Any]:
    answer = request(url, f"/api/groups?group=shop&after={after}")
    assert answer.status == 200
    return answer.content  # type: ignore[no-any-return] # an object


def test_the_page_loads_its_own_files_and_nothing_else_and_is_shown_to_no_other_site() -> None:
    with serving(Scene()) as url:
        page, script, style = (request(url, path) for path in ("/", "/page.js", "/page.css"))
        paths = ("/", "/page.js", "/api/groups", "/api/message")
        others = [request(url, path, Host="evil.example:8400") for path in paths]
        actions = state(url)["actions"]

    refused = (403, {"said": "this address is only for this machine"})
    assert [(it.status, it.content) for it in others] == [refused] * 4
    assert actions == []
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (page.headers["x-content-type-options"], page.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert "<script>" not in page.text
    assert script.headers["content-type"].startswith("text/javascript")
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert word not in script.text
    for it in (page, script, style):
        assert "http://" not in it.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in it.text


def test_a_state_names_groups_and_a_view_has_its_details_the_worst_first_and_an_unknown_lag_is_none() -> None:
    many = [partition("orders", n, state="queued") for n in range(300)]
    many[170] |= {"trouble": "the topic does not exist", "lag": None}
    usual = Scene()
    with serving(Scene(lambda: [alone("big", partitions=many), *usual.groups()])) as url:
        groups = request(url, "/api/groups").content["groups"]
        shop, member, nobody, big = (
            request(url, f"/api/groups?group={view}").content["group"]
            for view in ("shop", "shop&member=vm-7f22-1c", "nobody", "big")
        )

    assert [group["name"] for group in groups] == ["shop", "big", "lake", "mailer"]
    assert [problem["kind"] for problem in shop["problems"][:4]] == ["transaction", "handler", "silent", "dead letter"]
    assert [lanes["handler"] for lanes in shop["lanes"]] == ["book", "charge"]
    assert (shop["dead_letters"][0]["count"], shop["transactions"][0]["checks"]) == (11, 3)
    assert {part["member"] for part in member["partitions"]} == {"vm-7f22-1c"}
    assert nobody is None
    assert (big["partition_count"], big["partitions"][0]["partition"], len(big["partitions"])) == (300, 170, 250)
    assert [group["lag"] for group in groups if group["name"] in {"big", "mailer"}] == [None, 9]
    assert big["members"][0]["lag"] is None


def test_states_come_again_and_again_and_history_with_the_first_and_after_one_of_another_process() -> None:
    scene = Scene()
    scene.is_stale = True
    with serving(scene) as url:
        first = state(url)
        second = state(url, first["made"])
        others = [state(url, after) for after in ("1e12", "inf", "nan")]
        unread = request(url, "/api/groups?after=now")

    assert set(first["history"]["series"]["lag"]) == {None}  # two points on a busy machine
    assert second["made"] > first["made"]
    assert [unread.status, *("history" in other for other in others)] == [422, True, True, True]


def test_a_browser_that_reads_nothing_or_is_gone_delays_no_other() -> None:
    with serving(Scene()) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0)) as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.sendall(b"GET /api/groups?group=shop HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 9)
            assert state(url, state(url)["made"])
        assert request(url, "/").status == 200


def test_a_report_that_breaks_the_page_costs_a_line_in_the_log_and_browsers_that_are_too_many_are_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene()
    good, scene.make = scene.make, lambda: 1 / 0  # type: ignore[assignment, return-value] # no state can be made
    monkeypatch.setattr("penstock.fleet.page.server._MOST_BROWSERS", 1)
    with serving(scene) as url, ThreadPoolExecutor() as browsers:
        asked = [browsers.submit(request, url, "/api/groups") for _ in range(3)]
        wait_until(lambda: sum(answer.done() for answer in asked) == 2)
        wait_until(lambda: "the page could not be made" in caplog.text)
        scene.make = good
        answers = sorted(answer.result(60).status for answer in asked)

        assert answers == [200, 503, 503]
        wait_until(lambda: request(url, "/api/groups").status == 200)

    assert caplog.text.count("the page could not be made") == 1


def test_messages_are_hidden_unless_switched_on_and_what_is_wrong_is_said() -> None:
    place = "/api/message?topic=payments&partition=1&offset=48228"
    held = [partition("gone", 3, blocking_offset=7), partition("payments", 1, blocking_offset=48_228)]

    def read(topic: str, number: int, offset: int) -> dict[str, Any]:
        if topic == "gone":
            raise PenstockError("there is no message at gone:3@7")
        return {"key": f"{topic}:{number}@{offset}"}

    with serving(Scene()) as url:
        hidden = request(url, place)
    with serving(Scene(lambda: [alone("shop", partitions=held)]), read_message=read) as url:
        unseen = request(url, place)
        assert request(url, "/api/groups?group=shop").status == 200
        shown, gone = request(url, place), request(url, "/api/message?topic=gone&partition=3&offset=7")
        others = [
            request(url, f"/api/message?{asked}").status
            for asked in ("topic=payments&partition=1&offset=48229", "topic=secrets&partition=0&offset=0")
        ]
        wrong = [
            request(url, f"/api/message?{asked}").status
            for asked in (
                "topic=orders&partition=three&offset=7",
                "topic=orders&partition=0",
                f"topic=payments&partition={2**31}&offset=48228",
                f"topic=payments&partition=1&offset={2**63}",
                "topic=payments&partition=1&offset=-1",
                "topic=payments%00&partition=1&offset=48228",
            )
        ]

    assert (hidden.status, "--show-messages" in hidden.text) == (403, True)
    assert (shown.status, shown.content) == (200, {"key": "payments:1@48228"})
    assert (gone.status, gone.content) == (404, {"said": "there is no message at gone:3@7"})
    assert (unseen.status, others) == (404, [404, 404])
    assert wrong == [422] * 6
