"""Groups as reports would describe them, without a Kafka: what pages are drawn from in tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from hypothesis import strategies as st
from starlette.routing import BaseRoute

from penstock.consumer.latencies import BUCKETS
from penstock.fleet import Address
from penstock.fleet.commands.command import ACTIONS
from penstock.fleet.page.hub import Source
from penstock.fleet.page.server import PageServer
from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import Report, decode_report, encode_report
from penstock.fleet_member import Sender

#: A text that a forged record may contain anywhere.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


def partition(topic: str, number: int, **extra: Any) -> dict[str, Any]:
    known = {"watermark": 48_211 + 17 * number, "in_flight": 6, "bytes_in_flight": 2_410, "lag": 12, "gaps": 1}
    position = known["watermark"] + 9
    return {"topic": topic, "partition": number, "handler": "handle", "position": position, **known, **extra}


def report(group: str, member: str, uptime_s: float = 600.0, sequence: int = 1, **description: Any) -> Report:
    sender = Sender(group, member, member.rpartition("-")[0] or member, 4711)
    rates = description.pop("rates", {"handled": 410.0, "failed": 0.2})
    numbers = {"sequence": sequence, "interval_s": 2.0, "uptime_s": uptime_s}
    return decode_report(sender.key, encode_report(sender, description, rates, numbers))


def alone(group: str, member: str = "vm-1", **description: Any) -> Group:
    """Return a group of one member, which reported a second ago."""
    return Group(group, [Member(report(group, member, **description), 1.0, is_silent=False)])


def planted(text: str) -> Group:
    """Return a group in which everything that a stranger may write is this text."""
    part = partition(text, 1, handler=text, state=text, worker=text, detail=text, trouble=text, paused=text)
    part |= {"key_hash": text, "blocking_offset": 3, "attempt": 2, "age": 9.0}
    stuck = partition(text, 2, handler=text, state="in handler", worker=text, blocking_offset=3, age=9.0)
    message = {"topic": text, "partition": 1, "offset": 3}
    pending = {"id": text, "prefix": text, "group": text, "topics": text, "age": 99.0, "waits_for": text}
    forged = report(
        text,
        text,
        partitions=[part, stuck],
        counts={text: 1, "handled": 5, "pauses": {text: 3}},
        parked=[message | {"handler": text, "state": text, "key_hash": text, "attempt": 1}],
        sinks=[{"name": text, "state": text, "last_error": text, "batches": 2, "batch_seconds": 1.0}],
        dead_letters=[message | {"dead_letter_topic": text, "error": text, "count": 2}],
        lanes={text: {"depth": [1], "age": [0.5]}},
        coordinator={"counts": {"pending": 1}, "waits": [text], "transactions": [pending]},
    )
    return Group(text, [Member(forged, 1.0, is_silent=False), Member(forged, 60.0, is_silent=True)])


class Scene:
    """A source of groups, made at each look; without others they are a shop, a mailer and a lake."""

    def __init__(self, groups: Callable[[], Sequence[Group]] | None = None) -> None:
        self.trouble: str | None = None
        self.is_stale = False
        self.ignored: Mapping[str, int] = {}
        self.make = groups or self._known
        #: How often it was looked at.
        self.looks = 0

    def follow(self, timeout: float) -> None:
        time.sleep(min(timeout, 0.1))

    def groups(self) -> Sequence[Group]:
        self.looks += 1
        return self.make()

    def _known(self) -> Sequence[Group]:
        at: dict[str, Any] = {"uptime_s": 600.0 + self.looks, "sequence": self.looks}
        handled, latencies = 410 * self.looks, [0, 3, 40, 200, 120, 4, *[0] * (BUCKETS - 6)]
        counts = {"handled": handled, "failed": 3, "busy_workers": 11, "workers": 16, "in_flight": 214}
        usual = {"counts": counts, "latencies": {"handler": latencies, "done": latencies}, "commands": True}
        mails = [partition("mails", number, state="queued", lag=3) for number in range(3)]
        lake = {"name": "orders_to_lake", "state": "running", "batch_id": 7, "batches": 7, "batch_seconds": 1.9}
        refunds = {"name": "refunds_to_pg", "state": "waiting", "batches": 12, "last_error": "it refused"}
        silent = report("shop", "vm-7f23-9e", 431.0, 200, partitions=[partition("orders", number) for number in (6, 7)])
        shop = [
            Member(report("shop", "vm-7f21-a4", **at, **usual, **_orders()), 0.6, is_silent=False),
            Member(report("shop", "vm-7f22-1c", **at, **usual, **_payments()), 1.1, is_silent=False),
            Member(silent, 41.0, is_silent=True),
        ]
        mailer = alone("mailer", "vm-7f21-b0", **at, **usual, partitions=mails)
        return [Group("shop", shop), mailer, alone("lake", "spark-01-77", **at, sinks=[lake, refunds], rates={})]


def _orders() -> dict[str, Any]:
    """A handler that hangs, transactions without an end, and dead letters."""
    orders = [partition("orders", number, lag=900, state="queued") for number in range(6)]
    orders[3] |= {"blocking_offset": 48_262, "state": "in handler", "age": 74.2, "worker": "penstock-worker-shop-3"}
    orders[3] |= {"handler": "charge", "lag": 8_412, "in_flight": 812, "key_hash": "91c2aa07d4e0f318"}
    lanes = {"charge": {"depth": [3] * 64, "age": [0.2] * 64}, "book": {"depth": [1] * 64, "age": [0.01] * 64}}
    lanes["charge"]["depth"][19], lanes["charge"]["age"][19] = 812, 74.0
    undecided = {"id": "5f0c", "prefix": "penstock", "group": "checkout", "topics": "orders", "age": 94.0, "checks": 3}
    waits = {"decided": "COMMIT", "waits_for": "topic refunds, which does not exist"}
    transactions = [undecided, {**undecided, "id": "77aa", "topics": "payments", "age": 12.5, "checks": 0, **waits}]
    letter = {"topic": "orders", "dead_letter_topic": "dlq.orders", "error": "shop.errors.CardRefused", "count": 11}
    return {
        "partitions": orders,
        "lanes": lanes,
        "coordinator": {"counts": {"pending": 2, "committed": 18_211}, "waits": [], "transactions": transactions},
        "dead_letters": [{**letter, "partition": 2, "offset": 47_802, "age": 81.0}],
    }


def _payments() -> dict[str, Any]:
    """Parked keys, a dead letter that no topic takes, and a pause."""
    payments = [partition("payments", number, handler="book") for number in range(4)]
    parked = {"state": "parked", "attempt": 4, "age": 95.0, "due_in": 48.0, "key_hash": "0c77b1e09a3f2d64"}
    payments[1] |= {**parked, "blocking_offset": 48_228, "in_flight": 31, "lag": 340, "parked": 12}
    payments[2] |= {"blocking_offset": 48_245, "state": "dead letter", "lag": 96}
    payments[2]["detail"] = "dlq.payments does not take it: Broker: Unknown topic or partition; next try in 5 s"
    payments[3]["paused"] = "in-flight limit"
    key = {"topic": "payments", "partition": 1, "offset": 48_228, "handler": "book", **parked}
    return {"partitions": payments, "parked": [key, {**key, "partition": 0, "attempt": 1, "due_in": 0.8}]}


class _Served(PageServer):
    """A page with routes of actions."""

    def __init__(self, source: Source, actions: Sequence[BaseRoute] = (), **more: Any) -> None:
        offered, at = tuple(ACTIONS) if actions else (), Address("127.0.0.1", 0)
        super().__init__(at, lambda: nullcontext(source), "penstock.reports", actions=offered, **more)
        self._more = actions

    def routes(self) -> list[BaseRoute]:
        return [*self._more, *super().routes()]


@contextmanager
def serving(source: Source, **more: Any) -> Iterator[str]:
    """Serve a page of this source, and give its address."""
    with _Served(source, **more) as server:
        yield f"http://{server.address}"
