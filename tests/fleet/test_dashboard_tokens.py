"""The token of actions: wrong ones are slowed and keep nobody out; and who may ask at all."""

from __future__ import annotations

import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from action_tools import TOKEN, act, request, served

from penstock.errors import BrokerConnectionError, ConfigurationError
from penstock.fleet.actions import Surroundings, dashboard_token
from penstock.fleet.actions.tokens import TokenGuard
from penstock.fleet.commands.audit import Answer
from penstock.fleet.visitors import Visitors
from penstock.fleet_member import Outcome

#: Nobody listens there: what comes so far was let in.
NOWHERE = "127.0.0.1:1"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_answer_to_a_wrong_token_waits_longer_each_time_and_a_client_is_forgotten() -> None:
    clock = Clock()
    guard = TokenGuard(TOKEN, clock)
    delays = []
    for _ in range(8):
        delays.append(guard.judge("a", "wrong"))
        guard.answered("a")

    clock.now += 301
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]
    assert guard.judge("a", "wrong") == 1.0


def test_one_client_may_have_few_wrong_tokens_waiting_and_keeps_nobody_else_out() -> None:
    guard = TokenGuard(TOKEN, Clock())
    first = [guard.judge("a", "wrong") for _ in range(4)]
    for number in range(100):
        guard.judge(f"guesser {number}", "wrong")

    assert all(first)
    assert guard.judge("a", TOKEN) is None
    assert guard.judge("guesser 1", TOKEN) is None
    assert guard.judge("b", TOKEN) == 0
    guard.answered("a")
    for number in range(100):
        guard.answered(f"guesser {number}")
    assert guard.judge("a", TOKEN) == 0


def test_a_token_stands_in_the_environment_or_in_a_file_and_is_not_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.delenv("PENSTOCK_DASHBOARD_TOKEN", raising=False)

    assert (dashboard_token(), dashboard_token(file)) == (None, TOKEN)
    monkeypatch.setenv("PENSTOCK_DASHBOARD_TOKEN", "canary")
    with pytest.raises(ConfigurationError, match="PENSTOCK_DASHBOARD_TOKEN must have 16") as short:
        dashboard_token()
    file.write_text("")
    with pytest.raises(ConfigurationError, match="must have 16 printable characters"):
        dashboard_token(file)
    with pytest.raises(ConfigurationError, match="cannot be read: FileNotFoundError"):
        dashboard_token(tmp_path / "none")
    assert "canary" not in str(short.value)


def test_only_a_page_of_this_address_may_ask_and_only_as_it_should() -> None:
    asked = {"group": "sms", "topic": "orders", "dry_run": True}
    good = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    with served(Surroundings(NOWHERE)) as address:

        def status(body: object = asked, name: str = "pause", **headers: str) -> int:
            given = {**good, **{one.replace("_", "-"): value for one, value in headers.items()}}
            return request(address, f"/api/actions/{name}", body, **given)[0]

        names = request(address, "/api/actions")[1]
        assert (names["enabled"], len(names["actions"])) == (True, 8)
        assert request(address, "/api/actions", Host="evil.example")[0] == 403
        assert status() == 200
        assert status(Origin=address) == 200
        assert status(Host="evil.example") == 403
        assert status(Origin="http://evil.example") == 403
        assert status(Origin="null") == 403
        assert status(Sec_Fetch_Site="cross-site") == 403
        assert status(Content_Type="text/plain") == 415
        assert status(name="shut-down") == 404
        assert status(Authorization="Basic abc") == 401
        assert status(b"[]") == 422
        assert status(b"{") == 422
        assert status(b"[" * 10_000) == 422
        assert status(b'{"group": NaN}') == 422
        assert status(b" " * 20_000) == 413
        assert status({**asked, "topci": "orders"}) == 422
        assert status({**asked, "partition": -1}) == 422
        assert status({**asked, "partition": True}) == 422
        assert status({**asked, "topic": "x" * 501}) == 422

    with served(Surroundings(NOWHERE), None) as address:
        assert request(address, "/api/actions") == (200, {"enabled": False, "actions": []})
        off, told = act(address, "pause", group="sms", topic="orders")
    assert (off, "actions are off" in told["said"]) == (403, True)


def test_behind_a_proxy_its_address_counts_as_the_pages_own_and_each_client_is_slowed_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.fleet.actions.tokens._FIRST_DELAY_S", 0.3)
    visitors = Visitors(is_loopback=True, public_url="https://ops.example/penstock/")
    asked = {"group": "sms", "topic": "orders", "dry_run": True}
    json_body = {"Content-Type": "application/json"}
    good = {"Authorization": f"Bearer {TOKEN}", **json_body}
    with served(Surroundings(NOWHERE), visitors=visitors) as address:

        def status(**headers: str) -> int:
            return request(address, "/api/actions/pause", asked, **{**good, **headers})[0]

        assert status(Origin="https://ops.example") == 200
        assert status(Origin="https://ops.example", Host="ops.example") == 200
        assert status(Origin="http://ops.example") == 403
        assert status(Origin="https://evil.example") == 403
        assert status(Host="evil.example") == 403
        with ThreadPoolExecutor(5) as guesses:
            wrong = {"Authorization": "Bearer wrong", "X-Forwarded-For": "10.0.0.1, 10.0.0.66"}
            found = list(guesses.map(lambda _: status(**wrong), range(5)))
        assert 429 in found
        assert status(**{"X-Forwarded-For": "10.0.0.66, 10.0.0.7"}) == 200

    with pytest.raises(ConfigurationError, match=r"--public-url 'ops\.example' is no address of a page"):
        Visitors(is_loopback=True, public_url="ops.example")


def test_what_is_planted_in_parameters_comes_back_escaped() -> None:
    planted = "<script>alert(1)</script>\r\nSet-Cookie: a=b\x1b[31m"
    with served(Surroundings(NOWHERE)) as address:
        asked = urllib.request.Request(  # noqa: S310 - this machine's
            f"{address}/api/actions/pause",
            b'{"group":"sms","dry_run":true,"topic":%s}' % json.dumps(planted).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked) as answer:  # noqa: S310 - this machine's
            text, headers = answer.read(), answer.headers

    assert b"<script" not in text
    assert b"\\u003cscript\\u003ealert(1)" in text
    assert b"\x1b" not in text
    assert "Set-Cookie" not in headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "default-src 'none'"


def test_an_action_without_brokers_or_beyond_the_limit_says_that_nothing_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreached(*_: object) -> NoReturn:
        raise BrokerConnectionError("no broker answered")

    monkeypatch.setattr("penstock.fleet.actions.performing.CommandSender", unreached)
    with served(Surroundings(NOWHERE)) as address:
        status, told = act(address, "stacks", group="sms", member="one")
    monkeypatch.setattr("penstock.fleet.actions.endpoints.MOST_RUNNING", 0)
    with served(Surroundings(NOWHERE)) as address:
        full, full_told = act(address, "stacks", group="sms", member="one")

    assert (status, told["outcome"]) == (200, "failed")
    assert told["said"] == "nothing was done, for it cannot be written to the audit: no broker answered"
    assert (full, "wait until one has ended" in full_told["said"]) == (503, True)


def test_an_action_that_takes_too_long_is_answered_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def plan(*_: object) -> Answer:
        go_on.wait(60)
        ended.set()
        return Answer(Outcome.DONE, "done")

    monkeypatch.setattr("penstock.fleet.actions.endpoints.plan", plan)
    monkeypatch.setattr("penstock.fleet.actions.endpoints.ANSWER_S", 0.1)
    with served(Surroundings(NOWHERE)) as address:
        _, told = act(address, "stacks", group="sms", member="one", dry_run=True)
        is_ended = ended.is_set()
        go_on.set()
        assert ended.wait(60)

    assert (told["outcome"], is_ended) == ("failed", False)
    assert told["said"] == "stacks did not end within 0.1 s and goes on; the audit has what came of it"
