"""The page's addresses over HTTP: what they answer, to whom, and that no browser costs anything."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from scenes import Scene, alone, partition, serving

from penstock.errors import PenstockError
from waiting import wait_until


def get(url: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def state(url: str, after: float = 0.0) -> dict[str, Any]:
    status, _, body = get(url, f"/api/groups?group=shop&after={after}")
    assert status == 200
    return json.loads(body)  # type: ignore[no-any-return] # an object


def test_the_page_loads_its_own_files_and_nothing_else_and_is_shown_to_no_other_site() -> None:
    with serving(Scene()) as url:
        _, headers, page = get(url, "/")
        script, style = get(url, "/page.js"), get(url, "/page.css")
        paths = ("/", "/page.js", "/api/groups", "/api/message")
        others = [get(url, path, Host="evil.example:8400") for path in paths]

    assert [(status, body) for status, _, body in others] == [(403, "this address is for this machine alone\n")] * 4
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert "<script>" not in page
    assert script[1]["content-type"].startswith("text/javascript")
    assert not [
        word for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(") if word in script[2]
    ]
    assert not [
        one
        for one in (page, script[2], style[2])
        if "http://" in one.replace("http://www.w3.org/2000/svg", "") or "https://" in one
    ]


def test_a_state_names_groups_and_a_view_has_its_details() -> None:
    with serving(Scene()) as url:
        _, _, groups = get(url, "/api/groups")
        _, _, shop = get(url, "/api/groups?group=shop")
        _, _, member = get(url, "/api/groups?group=shop&member=vm-7f22-1c")
        _, _, nobody = get(url, "/api/groups?group=nobody")

    assert [one["name"] for one in json.loads(groups)["groups"]] == ["shop", "lake", "mailer"]
    told = json.loads(shop)["group"]
    assert [one["kind"] for one in told["problems"][:4]] == ["transaction", "handler", "silent", "dead letter"]
    assert [one["handler"] for one in told["lanes"]] == ["book", "charge"]
    assert (told["dead_letters"][0]["count"], told["transactions"][0]["checks"]) == (11, 3)
    assert {one["member"] for one in json.loads(member)["group"]["partitions"]} == {"vm-7f22-1c"}
    assert json.loads(nobody)["group"] is None


def test_a_lag_that_is_not_known_is_not_shown_as_none() -> None:
    known, away = partition("orders", 0, lag=3), partition("orders", 1, lag=None, trouble="no broker answers")
    groups = [alone("known", partitions=[known]), alone("away", partitions=[known, away])]
    with serving(Scene(lambda: groups)) as url:
        told = json.loads(get(url, "/api/groups")[2])["groups"]
        (member,) = json.loads(get(url, "/api/groups?group=away")[2])["group"]["members"]

    assert {group["name"]: group["lag"] for group in told} == {"known": 3, "away": None}
    assert member["lag"] is None


def test_states_come_again_and_again_and_history_with_the_first() -> None:
    with serving(Scene()) as url:
        first = state(url)
        second = state(url, first["made"])
        unread = get(url, "/api/groups?after=now")

    assert "handled" in first["history"]["series"]
    assert second["made"] > first["made"]
    assert unread[0] == 422


@pytest.mark.parametrize("after", ["1e12", "inf", "nan"])
def test_a_browser_with_a_state_of_another_process_gets_one_of_this(after: str) -> None:
    with serving(Scene()) as url:
        status, _, told = get(url, f"/api/groups?after={after}")

    assert (status, "history" in json.loads(told)) == (200, True)


def test_a_page_without_actions_says_so() -> None:
    with serving(Scene()) as url:
        status, _, told = get(url, "/api/actions")

    assert (status, json.loads(told)) == (200, {"enabled": False, "actions": []})


def test_a_browser_that_takes_nothing_or_is_gone_holds_nobody_up() -> None:
    with serving(Scene()) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0)) as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.sendall(b"GET /api/groups?group=shop HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 9)
            assert state(url, state(url)["made"])
        assert get(url, "/")[0] == 200


def test_browsers_beyond_the_limit_are_told_so_and_places_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    good, scene.make = scene.make, lambda: 1 / 0  # type: ignore[assignment, return-value] # nobody gets a state
    monkeypatch.setattr("penstock.fleet.page.server._MOST_BROWSERS", 1)
    with serving(scene) as url, ThreadPoolExecutor() as browsers:
        asked = [browsers.submit(get, url, "/api/groups") for _ in range(3)]
        wait_until(lambda: sum(answer.done() for answer in asked) == 2)
        scene.make = good
        answers = sorted(answer.result(60)[0] for answer in asked)

        assert answers == [200, 503, 503]
        wait_until(lambda: get(url, "/api/groups")[0] == 200)


def test_messages_are_hidden_unless_switched_on_and_what_is_wrong_is_said() -> None:
    place = "/api/message?topic=payments&partition=1&offset=48228"
    told = [partition("gone", 3, blocking_offset=7), partition("payments", 1, blocking_offset=48_228)]

    def read(topic: str, number: int, offset: int) -> dict[str, Any]:
        if topic == "gone":
            raise PenstockError("there is no message at gone:3@7")
        return {"key": f"{topic}:{number}@{offset}"}

    with serving(Scene()) as url:
        hidden = get(url, place)
    with serving(Scene(lambda: [alone("shop", partitions=told)]), read_message=read) as url:
        unseen = get(url, place)
        assert get(url, "/api/groups?group=shop")[0] == 200
        shown, gone = get(url, place), get(url, "/api/message?topic=gone&partition=3&offset=7")
        others = [
            get(url, f"/api/message?topic={topic}&partition={number}&offset={offset}")[0]
            for topic, number, offset in (("payments", 1, 48_229), ("secrets", 0, 0))
        ]
        wrong = [
            get(url, f"/api/message?{asked}")[0]
            for asked in (
                "topic=orders&partition=three&offset=7",
                "topic=orders&partition=0",
                f"topic=payments&partition={2**31}&offset=48228",
                f"topic=payments&partition=1&offset={2**63}",
                "topic=payments&partition=1&offset=-1",
                "topic=payments%00&partition=1&offset=48228",
            )
        ]

    assert (hidden[0], "--show-messages" in hidden[2]) == (403, True)
    assert (shown[0], json.loads(shown[2])) == (200, {"key": "payments:1@48228"})
    assert (gone[0], json.loads(gone[2])) == (404, {"said": "there is no message at gone:3@7"})
    assert (unseen[0], others) == (404, [404, 404])
    assert wrong == [422] * 6


def test_a_report_that_breaks_the_page_costs_a_line_in_the_log_and_not_the_hub(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    good, scene.make = scene.make, lambda: 1 / 0  # type: ignore[assignment, return-value] # on purpose
    with serving(scene) as url:
        wait_until(lambda: "the page could not be made" in caplog.text)
        scene.make = good
        assert get(url, "/api/groups")[0] == 200

    assert caplog.text.count("the page could not be made") == 1


def test_partitions_that_need_somebody_come_first_and_the_rest_is_counted() -> None:
    many = [partition("orders", n, state="queued") for n in range(300)]
    many[170] |= {"trouble": "the topic does not exist", "lag": None}
    with serving(Scene(lambda: [alone("big", partitions=many)])) as url:
        group = json.loads(get(url, "/api/groups?group=big")[2])["group"]

    assert (group["partition_count"], group["partitions"][0]["partition"], len(group["partitions"])) == (300, 170, 250)
