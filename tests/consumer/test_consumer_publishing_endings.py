"""Ends of an app's Kafka transactions that come late, never or twice: the group's offsets say the outcome."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

import penstock
from kafka_proxy import END_TXN, OFFSET_FETCH, KafkaProxy, What
from kafka_tools import committed, produce, read_all
from penstock.clients import cluster
from penstock.clients.transactional import writer
from penstock.devbroker import DevBroker
from waiting import wait_until

NewTopic = Callable[..., str]


@dataclass
class Copying:
    """An app behind a proxy that copies messages from a topic to another, exactly once; all else goes straight."""

    servers: str
    proxy: KafkaProxy
    source: str
    target: str
    handled: Counter[bytes | None] = field(default_factory=Counter)
    fed: list[bytes] = field(default_factory=list)

    def app(self) -> penstock.App:
        app = penstock.App(self.source, bootstrap_servers=self.proxy.bootstrap_servers, exactly_once=True)

        @app.handler(self.source)
        def copy(message: penstock.Message) -> list[penstock.Outgoing]:
            self.handled[message.value] += 1
            value = message.value or b""
            return [penstock.Outgoing(self.target, value + part, message.key) for part in (b"/0", b"/1")]

        return app

    def feed(self, *values: bytes) -> None:
        self.fed += values
        produce(self.servers, self.source, ((b"k", value) for value in values))

    @property
    def is_done(self) -> bool:
        return committed(self.servers, self.source, self.source, 1)[0].offset == len(self.fed)

    def settle(self) -> None:
        wait_until(lambda: self.is_done, interval=0.1)

    def visible(self, *, left_open: bool = False) -> list[bytes | None]:
        return [message.value() for message in read_all(self.servers, self.target, left_open=left_open)]

    def require_all_once(self) -> None:
        """Require that each result is visible once, in order, and no handler was called again."""
        assert self.visible() == [value + part for value in self.fed for part in (b"/0", b"/1")]
        assert self.handled == Counter(self.fed)


@pytest.fixture
def copying(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Copying]:
    """An app that has committed something already, so that all its connections stand; it waits 2 s for an end."""
    monkeypatch.setattr(writer, "_END_CALL_S", 2.0)
    caplog.set_level(logging.INFO, "penstock")
    with KafkaProxy(broker.bootstrap_servers) as proxy:
        made = Copying(broker.bootstrap_servers, proxy, new_topic(), new_topic())
        made.feed(b"first")
        with made.app().start():
            made.settle()
            yield made


def doubts(caplog: pytest.LogCaptureFixture) -> bool:
    """Return whether a producer was given up because of the end of a transaction."""
    said = ("the group's offsets will tell", "its producer is replaced")
    return any(text in record.getMessage() for record in caplog.records for text in said)


@pytest.mark.parametrize(
    "what",
    [
        What.DROP_ANSWER,
        *(
            pytest.param(what, marks=pytest.mark.thorough)
            for what in (What.CUT_BEFORE, What.CUT_AFTER, What.DROP_REQUEST, What.DELAY_ANSWER)
        ),
    ],
)
def test_a_transaction_whose_end_is_not_answered_takes_effect_once(
    what: What, copying: Copying, caplog: pytest.LogCaptureFixture
) -> None:
    known = len(copying.proxy.identities)

    with copying.proxy.fault(END_TXN, what, committed=True):
        copying.feed(b"a", b"b")
        wait_until(lambda: doubts(caplog))
        copying.settle()
    copying.feed(b"c")
    copying.settle()

    copying.require_all_once()
    assert doubts(caplog)
    assert len(copying.proxy.identities) > known, "a successor ends what its predecessor left open"


@pytest.mark.thorough
def test_a_doubt_lasts_until_the_groups_offsets_are_reported(
    copying: Copying, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_S", 1.0)

    with (
        copying.proxy.fault(END_TXN, What.DROP_ANSWER, committed=True),
        copying.proxy.fault(OFFSET_FETCH, What.DROP_ANSWER, times=2) as unanswered,
    ):
        copying.feed(b"a")
        wait_until(lambda: unanswered.fired == 2)
        copying.settle()
    copying.feed(b"b")
    copying.settle()

    copying.require_all_once()
    assert doubts(caplog)


def test_an_end_that_comes_after_the_next_begin_ends_nothing_else(
    copying: Copying, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = copying.proxy
    with proxy.fault(END_TXN, What.HOLD_AND_CUT, committed=True) as late:
        copying.feed(b"a")
        copying.settle()
        # The broker has committed, and the library says so; the app looks what its log says of that.
        wait_until(lambda: doubts(caplog))
        monkeypatch.setattr(writer, "_END_CALL_S", 60.0)  # the next end is waited for as long as this test needs
        with proxy.fault(END_TXN, What.HOLD, committed=True) as standing:
            # All of a transaction is written, and its end is on the way ...
            copying.feed(b"b")
            wait_until(lambda: standing.fired)
            visible = copying.visible(left_open=True)
            # ... when the late end arrives.
            proxy.let_go(late)
            assert copying.visible(left_open=True) == visible
            assert visible[-1] == b"a/1"
    copying.settle()

    assert late.end is not None
    assert standing.end is not None
    assert (standing.end.producer_id, standing.end.epoch) != (late.end.producer_id, late.end.epoch)
    copying.require_all_once()
