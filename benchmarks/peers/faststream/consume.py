"""Consumes with FastStream's concurrent subscriber: at most once, in no order; `confluent` or `aiokafka` comes first.

More than one worker needs its policy ACK_FIRST, which commits messages before they are handled. Its decoder is unused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import uuid

from faststream import AckPolicy
from peers.measurement import Measurement, Task

if sys.argv[1] == "confluent":
    from faststream.confluent import KafkaBroker
    from faststream.confluent.annotations import KafkaMessage
else:
    from faststream.kafka import KafkaBroker
    from faststream.kafka.annotations import KafkaMessage


async def raw(message: KafkaMessage) -> bytes:
    """Leave the body as it is."""
    return message.body


async def main() -> None:
    """Consume until all is handled."""
    task = Task.parse(sys.argv[2:])
    measurement = Measurement(task)
    broker = KafkaBroker(task.servers, logger=None)

    @broker.subscriber(
        task.topic,
        group_id=uuid.uuid4().hex,
        auto_offset_reset="earliest",
        max_workers=task.width,
        ack_policy=AckPolicy.ACK_FIRST,
        decoder=raw,
    )
    async def handle(_body: bytes) -> None:
        measurement.begin()
        if task.handler_s:
            await asyncio.sleep(task.handler_s)
        measurement.end()

    await broker.start()
    await asyncio.to_thread(measurement.wait)
    os._exit(0)  # the measurement is over: messages in flight do not matter


logging.disable(logging.CRITICAL)
asyncio.run(main())
