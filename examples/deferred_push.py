"""Deferred completion: a client answers by callback, and its answer decides whether the message is done.

One worker thread hands messages over; the client's own threads wait. Until the answer the key waits, so the texts of
one device stay in order, and no offset at or above the message's is committed.

`python examples/feed.py notifications` writes messages (see there for the broker); then, in this folder:

    penstock run deferred_push:app
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import penstock

log = logging.getLogger("push")
pool = ThreadPoolExecutor(8, thread_name_prefix="push")
tried: set[bytes] = set()
app = penstock.App(
    "deferred-push", bootstrap_servers=os.environ.get("PENSTOCK_BOOTSTRAP_SERVERS", "127.0.0.1:9092"), workers=1
)


def send(device: bytes, text: bytes, on_answer: Callable[[Exception | None], object]) -> None:
    """Replace the client of a push service: it calls back on its own thread."""
    time.sleep(0.05)
    if text.endswith(b"3") and text not in tried:  # the network loses some once
        tried.add(text)
        on_answer(ConnectionError("the push service did not answer"))
        return
    log.info("%s got %s by %s", device.decode(), text.decode(), threading.current_thread().name)
    on_answer(None)


@app.lifespan
def client() -> Generator[None, None, None]:
    """End the client's threads after the consumer, so that the last answers arrive."""
    yield
    pool.shutdown()


@app.handler("notifications", on_failure="dead_letter")
def push(message: penstock.Message) -> penstock.DeferredCompletion:
    """Hand a text over and return at once; no answer within 30 s counts as a failure."""
    completion = penstock.DeferredCompletion(timeout=30)

    def answered(error: Exception | None) -> None:
        completion.complete() if error is None else completion.fail(error)

    pool.submit(send, message.key or b"", message.value or b"", answered)
    return completion
