"""penstock and the bare loops of `side_by_side.py`, each in its own process.

usage: python benchmarks/side_by_side_contenders.py CONTENDER TASK...

CONTENDER is one of `CONTENDERS`; `peers/measurement.py` defines TASK and the printed line.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import uuid
from collections.abc import Callable

from confluent_kafka import Consumer
from peers.measurement import Measurement, Task

from penstock import App, Message
from penstock.consumer import ConsumerSettings


def penstock(task: Task) -> None:
    """An app with a plain handler."""
    measurement, seconds = Measurement(task), task.handler_s
    begin, end, sleep = measurement.begin, measurement.end, time.sleep
    app = App(uuid.uuid4().hex, bootstrap_servers=task.servers, workers=task.width)

    if seconds:

        @app.handler(task.topic)
        def sleeping(_message: Message) -> None:
            begin()
            sleep(seconds)
            end()
    else:

        @app.handler(task.topic)
        def empty(_message: Message) -> None:
            begin()
            end()

    with app.start():
        measurement.wait()


def penstock_async(task: Task) -> None:
    """An app with an `async def` handler."""
    measurement = Measurement(task)
    app = App(uuid.uuid4().hex, bootstrap_servers=task.servers, max_concurrency=task.width)

    @app.handler(task.topic)
    async def waiting(_message: Message) -> None:
        measurement.begin()
        await asyncio.sleep(task.handler_s)
        measurement.end()

    with app.start():
        measurement.wait()


def bare_loop(task: Task) -> None:
    """Call nothing: `consume` with penstock's fetch settings."""
    measurement = Measurement(task)
    config = ConsumerSettings().client_config(uuid.uuid4().hex)
    consumer = Consumer({**config, "bootstrap.servers": task.servers, "auto.offset.reset": "earliest"})
    consumer.subscribe([task.topic])
    judging = threading.Thread(target=measurement.wait)
    judging.start()
    while judging.is_alive():
        for message in consumer.consume(10_000, 0.1):
            if message.error() is None:
                measurement.begin()
                measurement.end()
    consumer.close()


def bare_threads(task: Task) -> None:
    """Consume nothing: threads call a handler that sleeps."""
    measurement, left = Measurement(task), iter(range(task.count))

    def work() -> None:
        while next(left, None) is not None:
            measurement.begin()
            time.sleep(task.handler_s)
            measurement.end()

    for _ in range(task.width):
        threading.Thread(target=work, daemon=True).start()
    measurement.wait()


CONTENDERS: dict[str, Callable[[Task], None]] = {
    "penstock": penstock,
    "penstock-async": penstock_async,
    "bare-loop": bare_loop,
    "bare-threads": bare_threads,
}


if __name__ == "__main__":
    CONTENDERS[sys.argv[1]](Task.parse(sys.argv[2:]))
