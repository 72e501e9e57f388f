"""A process that has a file store and its coordinator, and sends until it is killed.

Arguments: Kafka's addresses, the store's folder, its prefix, the topic, the first number. Each number is printed once
its half is durable; two of three commit, the third rolls back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.transactions import Coordinator, new_id
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

THREADS = 4


def answer_of(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    """Ask the store, wait, and return its answer."""
    answers: list[Any] = []
    done = threading.Event()

    def tell(answer: Any) -> None:
        answers.append(answer)
        done.set()

    ask(tell)
    assert done.wait(60)
    return answers[0]


def verdict_of(number: int) -> Verdict:
    """Return the outcome of the local transaction with a number."""
    return Verdict.COMMIT if number % 3 else Verdict.ROLLBACK


def send(store: FileStore, topic: str, begin: int) -> None:
    """Send every fourth number from one on."""
    for number in range(begin, begin + 1_000_000, THREADS):
        half = Half(new_id(), "orders", topic, None, b"%d" % (number % 5), b"%d" % number, (), None)
        prepared = answer_of(partial(store.prepare, [half]))
        # One call: lines of several threads shall not mix.
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        assert answer_of(partial(store.decide, prepared, verdict_of(number))) is None


if __name__ == "__main__":
    servers, folder, prefix, topic, first = sys.argv[1:]
    with FileStore(folder, bootstrap_servers=servers, prefix=prefix, segment_bytes=16 << 10) as opened:
        Coordinator(store=opened, transaction_timeout=600).start()
        senders = [
            threading.Thread(target=send, args=(opened, topic, int(first) + offset), daemon=True)
            for offset in range(THREADS)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
