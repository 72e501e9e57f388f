"""Consumes with Quix Streams: one thread, in the order of partitions, at least once."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import uuid

from peers.measurement import Measurement, Task
from quixstreams import Application


def main() -> None:
    """Consume until all is handled."""
    task = Task.parse(sys.argv[1:])
    measurement = Measurement(task)
    app = Application(
        broker_address=task.servers,
        consumer_group=uuid.uuid4().hex,
        auto_offset_reset="earliest",
        auto_create_topics=False,
        loglevel=None,
    )

    def handle(_value: bytes) -> None:
        measurement.begin()
        if task.handler_s:
            time.sleep(task.handler_s)
        measurement.end()

    def judge() -> None:
        try:
            measurement.wait()
        finally:
            os._exit(0)  # the measurement is over: messages in flight do not matter

    threading.Thread(target=judge, daemon=True).start()
    app.dataframe(app.topic(task.topic, value_deserializer="bytes", key_deserializer="bytes")).update(handle)
    app.run()


logging.disable(logging.CRITICAL)
main()
