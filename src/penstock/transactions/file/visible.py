"""When a committed reader sees what was published: a broker answers the end of a transaction before it is there to see.

The markers that end a transaction are written a little later. The done log has one of each transaction; once it has no
open end, the transaction that wrote there last is over for its readers.
"""

from __future__ import annotations

import threading
import time

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in its __all__

_ANSWER_S = 2.0
_LOOK_S = 0.002
_LONGEST_S = 5.0


def await_visible(admin: AdminClient, topic: str, stopping: threading.Event) -> None:
    """Wait until readers of committed records see all of partition 0 of a done log that its only writer has ended.

    It waits no longer than some seconds: where brokers do not answer, that it was committed is all there is to tell.
    """
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline and not stopping.is_set():
        try:
            if _end(admin, topic, IsolationLevel.READ_COMMITTED) == _end(admin, topic, IsolationLevel.READ_UNCOMMITTED):
                return
        except KafkaException:
            pass
        stopping.wait(_LOOK_S)


def _end(admin: AdminClient, topic: str, isolation: IsolationLevel) -> int:
    place = TopicPartition(topic, 0)
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call] # untyped in the library
    asked = admin.list_offsets({place: latest}, isolation_level=isolation, request_timeout=_ANSWER_S)
    return int(asked[place].result().offset)


__all__ = ["await_visible"]
