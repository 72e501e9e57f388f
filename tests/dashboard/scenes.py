"""Groups as reports would tell of them, without a Kafka: what pages are drawn from in tests."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.dashboard import Address
from penstock.dashboard.page.hub import Hub
from penstock.dashboard.page.routes import page_routes
from penstock.dashboard.server import HttpServer
from penstock.reports.group_state import Group, Member
from penstock.reports.latencies import BUCKETS
from penstock.reports.report import Report, Sender, decode_report, encode_report

STACK = (
    '  File "shop/charge.py", line 41, in charge\n    bank.post(order)\n  File "http/client.py", line 310, in read\n'
)


def partition(topic: str, number: int, **extra: Any) -> dict[str, Any]:
    known = {"watermark": 48_211 + 17 * number, "in_flight": 6, "bytes_in_flight": 2_410, "lag": 12, "gaps": 1}
    return {
        "topic": topic,
        "partition": number,
        "handler": "handle",
        "position": known["watermark"] + 9,
        **known,
        **extra,
    }


def report(group: str, member: str, uptime_s: float = 600.0, sequence: int = 1, **told: Any) -> Report:
    sender = Sender(group, member, member.rpartition("-")[0] or member, 4711)
    rates = told.pop("rates", {"handled": 410.0, "failed": 0.2})
    numbers = {"sequence": sequence, "interval_s": 2.0, "uptime_s": uptime_s}
    return decode_report(sender.key, encode_report(sender, told, rates, numbers))


class Scene:
    """A source of groups that are made anew at each look, from the seconds since its start and its look's number."""

    def __init__(self, speed: float = 1.0) -> None:
        self.trouble: str | None = None
        self.ignored: Mapping[str, int] = {}
        self._begun = time.monotonic()
        self._speed = speed
        #: How often it was looked at.
        self.looks = 0

    def follow(self, timeout: float) -> None:
        time.sleep(min(timeout, 0.1))

    def groups(self) -> Sequence[Group]:
        self.looks += 1
        at = (time.monotonic() - self._begun) * self._speed
        return [Group("shop", self._shop(at)), Group("mailer", self._mailer(at)), Group("lake", self._lake(at))]

    def close(self) -> None:
        pass

    def _counts(self, at: float, rate: float, **more: float) -> dict[str, Any]:
        handled = rate * (at + 14 * math.sin(at / 47) + 5 * math.sin(at / 13))
        return {
            "handled": handled,
            "failed": 0.2 * at + 3 * math.sin(at / 31),
            "busy_workers": 11,
            "workers": 16,
            "in_flight": 214,
            **more,
        }

    def _latencies(self, at: float, slow: int) -> dict[str, list[int]]:
        counts = [0] * BUCKETS
        for bucket, share in ((3, 30), (4, 200), (5, 120), (6, 40), (8, 4 + slow)):
            counts[bucket] = int(share * at)
        return {"handler": counts, "done": [0, 0, *counts[:-2]]}

    def _shop(self, at: float) -> list[Member]:
        orders = [
            partition("orders", n, lag=900 + int(700 * math.sin(at / 90 + n / 3)), state="queued") for n in range(6)
        ]
        orders[3] |= {"blocking_offset": 48_262, "state": "in handler", "age": 74.2, "worker": "penstock-worker-shop-3"}
        orders[3] |= {
            "handler": "charge",
            "lag": 8_412,
            "in_flight": 812,
            "key_hash": "91c2aa07d4e0f318",
            "stack": STACK,
        }
        payments = [partition("payments", n, handler="book") for n in range(4)]
        payments[1] |= {"blocking_offset": 48_228, "state": "parked", "attempt": 4, "age": 95.0, "due_in": 48.0}
        payments[1] |= {"in_flight": 31, "lag": 340, "key_hash": "0c77b1e09a3f2d64", "parked": 12}
        payments[2] |= {"blocking_offset": 48_245, "state": "dead letter", "lag": 96}
        payments[2]["detail"] = "dlq.payments does not take it: Broker: Unknown topic or partition; next try in 5 s"
        payments[3]["paused"] = "in-flight limit"
        lanes = {
            "charge": {
                "depth": [int(3 + 9 * abs(math.sin(n / 5 + at / 30))) for n in range(64)],
                "age": [0.02 + (n % 7) / 12 for n in range(64)],
            },
            "book": {"depth": [1 if n % 3 else 0 for n in range(64)], "age": [0.01] * 64},
        }
        lanes["charge"]["depth"][19], lanes["charge"]["age"][19] = 812, 74.0
        lanes["charge"]["depth"][44], lanes["charge"]["age"][44] = 96, 8.0
        transactions = [
            {
                "id": "5f0c1d92e7a94b0fa31bd0d2",
                "prefix": "penstock",
                "group": "checkout",
                "topics": "orders",
                "age": 94.0,
                "checks": 3,
            },
            {
                "id": "77aa10b3c85e4d0e9b42c1f6",
                "prefix": "penstock",
                "group": "refunds",
                "topics": "payments",
                "age": 12.5,
                "checks": 0,
                "decided": "COMMIT",
                "waits_for": "topic refunds, which does not exist",
            },
        ]
        first = report(
            "shop",
            "vm-7f21-a4",
            at,
            self.looks,
            partitions=orders,
            lanes=lanes,
            latencies=self._latencies(at, 0),
            counts=self._counts(at, 410, parked_keys=0, dead_letters=14),
            commands=True,
            coordinator={
                "counts": {
                    "pending": 2,
                    "oldest_pending_age": 94.0,
                    "committed": 18_211,
                    "rolled_back": 12,
                    "checks": 5,
                    "no_producer": 0,
                    "discarded": 1,
                },
                "waits": [],
                "transactions": transactions,
            },
            dead_letters=[
                {
                    "topic": "orders",
                    "dead_letter_topic": "dlq.orders",
                    "error": "shop.errors.CardRefused",
                    "count": 11,
                    "partition": 2,
                    "offset": 47_802,
                    "age": 81.0,
                },
                {
                    "topic": "orders",
                    "dead_letter_topic": "dlq.orders",
                    "error": "builtins.ValueError",
                    "count": 3,
                    "partition": 0,
                    "offset": 47_120,
                    "age": 940.0,
                },
            ],
        )
        second = report(
            "shop",
            "vm-7f22-1c",
            at,
            self.looks,
            partitions=payments,
            latencies=self._latencies(at, 2),
            counts=self._counts(at, 180, parked_keys=3, pauses={"in-flight limit": 4}),
            commands=True,
            parked=[
                {
                    "topic": "payments",
                    "partition": 1,
                    "offset": 48_228,
                    "handler": "book",
                    "state": "parked",
                    "attempt": 4,
                    "age": 95.0,
                    "due_in": 48.0,
                    "key_hash": "0c77b1e09a3f2d64",
                },
                {
                    "topic": "payments",
                    "partition": 0,
                    "offset": 48_214,
                    "handler": "book",
                    "state": "parked",
                    "attempt": 1,
                    "age": 3.1,
                    "due_in": 0.8,
                    "key_hash": "5d1e00b7f6c2a911",
                },
            ],
        )
        third = report("shop", "vm-7f23-9e", 431.0, 200, partitions=[partition("orders", n) for n in (6, 7)])
        return [
            Member(first, 0.6, is_silent=False),
            Member(second, 1.1, is_silent=False),
            Member(third, 41.0, is_silent=True),
        ]

    def _mailer(self, at: float) -> list[Member]:
        parts = [partition("mails", n, state="queued", lag=3) for n in range(3)]
        told = report(
            "mailer",
            "vm-7f21-b0",
            at,
            self.looks,
            partitions=parts,
            counts=self._counts(at, 96),
            rates={"handled": 96.0},
            latencies=self._latencies(at, 0),
        )
        return [Member(told, 0.4, is_silent=False)]

    def _lake(self, at: float) -> list[Member]:
        batch = int(at / 5)
        sinks = [
            {
                "name": "orders_to_lake",
                "state": "running",
                "batch_id": batch,
                "batches": batch,
                "rows": 1_840 * batch,
                "rows_per_s": 368.0,
                "batch_seconds": 1.9 + math.sin(at / 11) / 2,
                "lag": 910,
                "restarts": 0,
            },
            {
                "name": "refunds_to_pg",
                "state": "waiting",
                "batch_id": 12,
                "batches": 12,
                "rows": 90,
                "lag": 44,
                "batch_seconds": 0.8,
                "restarts": 3,
                "retry_in": 21.0,
                "last_error": "the database refused the connection",
            },
        ]
        return [Member(report("lake", "spark-01-77", at, self.looks, sinks=sinks, rates={}), 0.9, is_silent=False)]


@contextmanager
def serving(source: Any, **more: Any) -> Iterator[str]:
    """Serve a page of this source, and give its address."""
    server = HttpServer(Address("127.0.0.1", 0))
    messages = more.get("read_message") is not None
    with Hub(source, {"of": "penstock.reports", "messages": messages}) as hub:
        server.start(page_routes(hub, is_loopback=True, **more))
        try:
            yield f"http://{server.address}"
        finally:
            server.stop()
