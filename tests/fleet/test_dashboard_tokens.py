"""The token of actions: wrong ones are slowed and block no other client; and who may ask at all."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from action_tools import TOKEN, act, request, served

from penstock.errors import BrokerConnectionError, ConfigurationError
from penstock.fleet.actions.dispatch import ActionContext
from penstock.fleet.actions.tokens import TokenGuard, dashboard_token
from penstock.fleet.commands.audit import Answer
from penstock.fleet.server import Visitors
from penstock.fleet_member import Outcome

#: No server listens there: a request that gets so far was let in.
NOWHERE = "127.0.0.1:1"
#: A request that is as it should be.
ASKED = {"group": "sms", "topic": "orders", "dry_run": True}
GOOD = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json"}


def status_at(address: str, body: object = ASKED, name: str = "pause", **headers: str) -> int:
    """Return the status of the answer to a request that is otherwise as it should be."""
    return request(address, f"/api/actions/{name}", body, **{**GOOD, **headers}).status


def test_the_answer_to_a_wrong_token_waits_longer_each_time_and_a_client_is_forgotten() -> None:
    now, delays = [0.0], []
    guard = TokenGuard(TOKEN, lambda: now[0])
    for _ in range(8):
        delays.append(guard.judge("a", "wrong"))
        guard.answered("a")

    now[0] += 301
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]
    assert guard.judge("a", "wrong") == 1.0


def test_one_client_may_have_few_wrong_tokens_waiting_and_blocks_no_other_client() -> None:
    guard = TokenGuard(TOKEN, lambda: 0.0)
    first = [guard.judge("a", "wrong") for _ in range(4)]

    assert all(first)
    assert [guard.judge(client, TOKEN) for client in ("a", "b")] == [None, 0]
    guard.answered("a")
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


def test_only_a_page_of_this_address_may_ask_and_only_as_it_should(caplog: pytest.LogCaptureFixture) -> None:
    with served(ActionContext(NOWHERE)) as address:
        status = partial(status_at, address)
        assert status() == 200
        assert status(Origin=address) == 200
        assert status(Host="evil.example") == 403
        assert status(Origin="http://evil.example") == 403
        assert status(Origin="null") == 403
        assert status(Sec_Fetch_Site="cross-site") == 403
        assert status(Content_Type="text/plain") == 415
        assert status(name="shut-down") == 404
        assert status(Authorization="Basic abc", X_Forwarded_For="10.0.0.66") == 401
        assert "a wrong token from 127.0.0.1;" in caplog.text
        assert status(b" " * 20_000) == 413
        for body in (b"[]", b"{", b"[" * 10_000, b'{"group": NaN}'):
            assert status(body) == 422
        settle = {"group": "shop", "transaction_id": "018f4e9c-5c1e-7abc-8def-0123456789ab", "decision": "commit"}
        for wrong, given in (("member", {}), ("transaction_id", {"member": "a", "transaction_id": "1 or 2"})):
            refused = request(address, "/api/actions/settle", settle | given, **GOOD)
            assert (refused.status, f"{wrong} must be" in refused.text) == (422, True)
        for given in ({"topci": "orders"}, {"partition": -1}, {"partition": True}, {"topic": "x" * 501}):
            assert status(ASKED | given) == 422

    with served(ActionContext(NOWHERE), None) as address:
        off, body = act(address, "pause", group="sms", topic="orders")
    assert (off, "actions are off" in body["said"]) == (403, True)


def test_behind_a_proxy_its_address_counts_as_the_pages_own_and_each_client_is_slowed_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.fleet.actions.tokens._FIRST_DELAY_S", 0.3)
    visitors = Visitors(is_loopback=True, public_url="https://ops.example:443/penstock/")
    with served(ActionContext(NOWHERE), visitors=visitors) as address:
        status = partial(status_at, address)
        assert status(Origin="https://ops.example") == 200
        assert status(Origin="https://ops.example", Host="ops.example") == 200
        assert status(Origin="http://ops.example") == 403
        assert [status(Origin=page) for page in ("https://evil.example", "http://[::1")] == [403, 403]
        assert status(Host="evil.example") == 403
        with ThreadPoolExecutor(12) as guesses:
            # HAProxy adds a header of its own below the client's.
            wrong = {"Authorization": "Bearer wrong", "X_Forwarded_For": "10.0.0.1", "X_forwarded_for": "10.0.0.66"}
            found = list(guesses.map(lambda _: status(**wrong), range(12)))
        assert 429 in found
        assert "a wrong token from 10.0.0.66;" in caplog.text
        assert status(X_Forwarded_For="10.0.0.66, 10.0.0.7") == 200

    for wrong_url in ("ops.example", "http://[ops"):
        with pytest.raises(ConfigurationError, match=rf"--public-url '{re.escape(wrong_url)}' is no address of a page"):
            Visitors(is_loopback=True, public_url=wrong_url)


def test_what_is_planted_in_parameters_comes_back_escaped() -> None:
    planted = "<script>alert(1)</script>\r\nSet-Cookie: a=b\x1b[31m"
    with served(ActionContext(NOWHERE)) as address:
        answer = request(address, "/api/actions/pause", {**ASKED, "topic": planted}, **GOOD)

    assert "<script" not in answer.text
    assert "\\u003cscript\\u003ealert(1)" in answer.text
    assert "\x1b" not in answer.text
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "default-src 'none'"


def test_an_action_without_brokers_or_beyond_the_limit_says_that_nothing_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreached(*_: object) -> NoReturn:
        raise BrokerConnectionError("no broker answered")

    monkeypatch.setattr("penstock.fleet.actions.dispatch.CommandSender", unreached)
    with served(ActionContext(NOWHERE)) as address:
        status, body = act(address, "stacks", group="sms", member="one")
    monkeypatch.setattr("penstock.fleet.actions.endpoints.MOST_RUNNING", 0)
    with served(ActionContext(NOWHERE)) as address:
        full, full_told = act(address, "stacks", group="sms", member="one")

    assert (status, body["outcome"]) == (200, "failed")
    assert body["said"] == "nothing was done, because it cannot be written to the audit: no broker answered"
    assert (full, "wait until one has ended" in full_told["said"]) == (503, True)


def test_an_action_that_takes_too_long_is_answered_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def plan(*_: object) -> Answer:
        go_on.wait(60)
        ended.set()
        return Answer(Outcome.DONE, "done")

    monkeypatch.setattr("penstock.fleet.actions.endpoints.plan", plan)
    monkeypatch.setattr("penstock.fleet.actions.endpoints.ANSWER_S", 0.1)
    with served(ActionContext(NOWHERE)) as address:
        _, body = act(address, "stacks", group="sms", member="one", dry_run=True)
        is_ended = ended.is_set()
        go_on.set()
        assert ended.wait(60)

    assert (body["outcome"], is_ended) == ("failed", False)
    assert body["said"] == "stacks did not end within 0.1 s and goes on; see its outcome in the audit"
