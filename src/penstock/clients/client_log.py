"""The Kafka client's own log lines, in our logger, in a sentence, and no faster than somebody can read them.

While a broker is away, each client says so at every try to reach it, many times a second. Of lines that say the same of
the same broker the first goes on at once, and then one every few seconds, with the number of those that were left out.
Where a program has set no logging up, Python shows these warnings on its screen: so they say what to change, where that
is known, and name nothing that is the library's own business.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from confluent_kafka import KafkaError

from penstock.clients.causes import AFTER, BROKER, THREAD, cause_of
from penstock.clients.kafka_errors import REBALANCING
from penstock.clients.ration import Ration

#: Seconds between two lines that say the same.
EVERY_S = 10.0

#: What differs between lines that say the same, save for what `causes` takes off.
_NUMBER = re.compile(r"\d+")
#: Kinds of lines about a connection: the client makes it again by itself.
_CONNECTION = frozenset({"FAIL", "ERROR"})
#: How a line ends of a transaction that a rebalance has refused: it is done again.
_REFUSED_BY_REBALANCE = re.compile(rf"\(({'|'.join(KafkaError(code).name() for code in REBALANCING)})\b")


class ClientLog:
    """Stands where the client library expects a `logging.Logger`. Thread-safe: all clients of a process share one."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._ration = Ration(EVERY_S, clock)
        #: The level of lines about a connection.
        self.connections = logging.WARNING

    def log(self, level: int, text: str, /, *arguments: object) -> None:
        """Take a line: its kind, the client's name and what it says are the arguments."""
        if level <= logging.DEBUG:
            # Whoever asked for those wants to see them.
            self._log.log(level, text, *arguments)
            return
        said = THREAD.sub("", str(arguments[-1])) if arguments else text
        broker = BROKER.search(said)
        kind = arguments[0] if arguments else None
        left_out = self._ration.take((kind, broker[0] if broker else "", _NUMBER.sub("#", AFTER.sub("", said))))
        if left_out is None:
            return
        if kind == "TXNERR" and _REFUSED_BY_REBALANCE.search(said):
            level = logging.INFO
        if level >= logging.WARNING:
            cause, is_connection = cause_of(said), kind in _CONNECTION
            remedy = cause.remedy or ("it tries again" if is_connection else "")
            level = self.connections if is_connection else level
            text, arguments = "a Kafka client says: %s", (f"{cause.words}; {remedy}" if remedy else cause.words,)
        if left_out:
            text, arguments = f"{text} (and %d more like it, left out)", (*arguments, left_out)
        self._log.log(level, text, *arguments)


#: Shared by all clients: what they say of one broker is the same.
client_log = ClientLog(logging.getLogger("penstock.kafka"))
