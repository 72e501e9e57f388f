"""A TCP proxy that understands Kafka's frame header, and can drop, delay, hold or cut a chosen request or its answer.

Clients reach the broker through it without the broker knowing: in the answers that name brokers, the broker's port is
replaced by the proxy's. One connection of a client is one connection to the broker, and what is held on it holds what
comes behind it, as on the real line; a request that is held reaches the broker even when its client has long gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Self

from waiting import wait_until

PRODUCE, FETCH, METADATA, OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR = 0, 1, 3, 8, 9, 10
INIT_PRODUCER_ID, ADD_PARTITIONS, ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT = 22, 24, 25, 26, 28
#: The first request on each connection.
API_VERSIONS = 18
DESCRIBE_CLUSTER = 60

#: Answers with addresses of brokers: one that refuses a partition, as a new one's for a moment, names its leader.
_ADDRESSES = frozenset({PRODUCE, FETCH, METADATA, FIND_COORDINATOR, DESCRIBE_CLUSTER})
#: The first version of InitProducerId whose answer begins with tagged fields.
_FLEXIBLE_INIT = 2


class What(Enum):
    """The effect of a fault."""

    DROP_REQUEST = "the request never arrives"
    DROP_ANSWER = "the answer never arrives"
    HOLD = "the request is held until released"
    HOLD_AND_CUT = "the request is held until released, and the client's connection ends at once"
    CUT_BEFORE = "the connection ends, and the request never arrives"
    CUT_AFTER = "the request arrives, and the connection ends before its answer"
    DELAY_ANSWER = "the answer is held until released"


class End(NamedTuple):
    """An EndTxn that a client sent."""

    transactional_id: str
    producer_id: int
    epoch: int
    committed: bool


class Identity(NamedTuple):
    """The broker's answer to InitProducerId."""

    producer_id: int
    epoch: int


@dataclass
class Fault:
    """A fault, armed. `fired` is asserted by the test: a fault that did not happen proves nothing."""

    api: int
    what: What
    #: Requests of this api to let pass first.
    skip: int = 0
    #: How often it happens.
    times: int = 1
    #: Only ends of this kind: a commit, or an abort.
    committed: bool | None = None
    #: Only requests with these bytes in them: the name of a topic, say.
    holding: bytes = b""
    #: Only ends of this producer.
    producer_id: int | None = None
    fired: int = 0
    #: The end that it happened to last.
    end: End | None = None
    #: Requests or answers that were held and then went on.
    went_on: int = 0
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, api: int, frame: bytes) -> bool:
        """Return whether it applies to this request, and count."""
        if api != self.api or self.fired == self.times or self.holding not in frame:
            return False
        if self.committed is not None and read_end(frame).committed is not self.committed:
            return False
        if self.producer_id is not None and read_end(frame).producer_id != self.producer_id:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.fired += 1
        self.end = read_end(frame) if api == END_TXN else None
        return True


def read_end(frame: bytes) -> End:
    """Read an EndTxn request of a version before the flexible ones, without its length."""
    (client,) = struct.unpack_from(">h", frame, 8)
    at = 10 + max(client, 0)
    (size,) = struct.unpack_from(">h", frame, at)
    name = frame[at + 2 : at + 2 + size].decode()
    return End(name, *struct.unpack_from(">qh?", frame, at + 2 + size))


@dataclass
class _Line:
    """One client's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    broker_reader: asyncio.StreamReader
    broker_writer: asyncio.StreamWriter
    #: By correlation id: api and version of requests whose answer is to come, and the fault for that answer.
    open: dict[int, tuple[int, int, Fault | None]] = field(default_factory=dict)


class KafkaProxy:
    """A proxy before one broker; a context manager. Its methods may be called from any thread.

    Args:
        bootstrap_servers: the broker's address, an IPv4 number and a port.
        own_port: where it listens, as another one did before; 0 is any free port.
    """

    def __init__(self, bootstrap_servers: str, own_port: int = 0) -> None:
        host, port = bootstrap_servers.split(":")
        self._host, self._port, self.own_port = host, int(port), own_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kafka-proxy", daemon=True)
        self._faults: list[Fault] = []
        self._lines: set[asyncio.Task[None]] = set()
        #: The proxy's port by the broker's, and where each broker of a cluster has a proxy, those of the others too.
        self.ports: dict[int, int] = {}
        #: Whether the line is cut: connections were closed, and new ones are refused. `cut` and `heal` set it.
        self.is_cut = False
        #: Seconds that an answer of an api is late by: a slow broker.
        self.late: dict[int, float] = {}
        #: How many requests of each api clients sent.
        self.requests: Counter[int] = Counter()
        #: EndTxn requests and answers to InitProducerId, in their order.
        self.ends: list[End] = []
        self.identities: list[Identity] = []

    def __enter__(self) -> Self:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._connected, self._host, self.own_port), self._loop
        ).result(30)
        self._server = server
        self.own_port = server.sockets[0].getsockname()[1]
        self.ports[self._port] = self.own_port
        #: Where clients connect to.
        self.bootstrap_servers = f"{self._host}:{self.own_port}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def cut(self) -> int:
        """Disconnect all clients, and let none in until `heal`. Returns how many there were."""
        self.is_cut, connected = True, len(self._lines)
        self._loop.call_soon_threadsafe(self._disconnect)
        return connected

    def heal(self) -> None:
        """Let clients in again."""
        self.is_cut = False

    def _disconnect(self) -> None:
        for line in self._lines:
            line.cancel()

    @contextlib.contextmanager
    def fault(
        self,
        api: int,
        what: What,
        *,
        skip: int = 0,
        times: int = 1,
        committed: bool | None = None,
        producer_id: int | None = None,
        holding: bytes = b"",
    ) -> Iterator[Fault]:
        """Arm a fault for the length of the block; the block must make it happen."""
        armed = Fault(api, what, skip, times, committed, holding, producer_id)
        self._faults.append(armed)
        try:
            yield armed
        finally:
            self._faults.remove(armed)
            self.release(armed)
        assert armed.fired, f"the fault did not happen: {what.value}"

    def release(self, fault: Fault) -> None:
        """Release the requests that a fault holds."""
        self._loop.call_soon_threadsafe(fault._released.set)

    def let_go(self, fault: Fault) -> None:
        """Release the requests that a fault holds, and wait until all are forwarded."""
        self.release(fault)
        wait_until(lambda: fault.went_on == fault.fired)

    async def _end(self) -> None:
        self._server.close()
        self._disconnect()
        await asyncio.gather(*self._lines, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self.is_cut:
            writer.close()
            return
        self._lines.add(task)
        try:
            broker_reader, broker_writer = await asyncio.open_connection(self._host, self._port)
            line = _Line(reader, writer, broker_reader, broker_writer)
            answers = asyncio.create_task(self._answers(line))
            try:
                await self._requests(line)
            finally:
                answers.cancel()
                await asyncio.gather(answers, return_exceptions=True)
                broker_writer.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # either side went away, or the test is over
        finally:
            writer.close()
            self._lines.discard(task)

    async def _requests(self, line: _Line) -> None:
        while True:
            frame = await _frame(line.reader)
            api, version, correlation = struct.unpack_from(">hhi", frame)
            self.requests[api] += 1
            if api == END_TXN:
                self.ends.append(read_end(frame))
            fault = next((one for one in self._faults if one.take(api, frame)), None)
            what = fault.what if fault is not None else None
            if what is What.DROP_REQUEST:
                continue
            if what is What.CUT_BEFORE:
                return
            if fault is not None and what in {What.HOLD, What.HOLD_AND_CUT}:
                if what is What.HOLD_AND_CUT:
                    line.writer.close()
                await fault._released.wait()
            line.open[correlation] = api, version, fault
            line.broker_writer.write(struct.pack(">i", len(frame)) + frame)
            await line.broker_writer.drain()
            if fault is not None and what in {What.HOLD, What.HOLD_AND_CUT}:
                # The broker answers once it has done it, whether the client is still there or not: then a test goes on.
                await fault._answered.wait()
                fault.went_on += 1

    async def _answers(self, line: _Line) -> None:
        try:
            while True:
                frame = await _frame(line.broker_reader)
                (correlation,) = struct.unpack_from(">i", frame)
                api, version, fault = line.open.pop(correlation)
                what = fault.what if fault is not None else None
                if api == INIT_PRODUCER_ID:
                    self._identified(frame, version)
                if fault is not None:
                    fault._answered.set()
                if what in {What.DROP_ANSWER, What.HOLD_AND_CUT}:
                    continue
                if what is What.CUT_AFTER:
                    return
                if fault is not None and what is What.DELAY_ANSWER:
                    await fault._released.wait()
                    fault.went_on += 1
                await asyncio.sleep(self.late.get(api, 0.0))
                if api in _ADDRESSES:
                    frame = self._readdressed(frame)
                line.writer.write(struct.pack(">i", len(frame)) + frame)
                await line.writer.drain()
        finally:
            line.writer.close()

    def _identified(self, frame: bytes, version: int) -> None:
        at = 4 + (version >= _FLEXIBLE_INIT)
        _, error, producer_id, epoch = struct.unpack_from(">ihqh", frame, at)
        if not error:
            self.identities.append(Identity(producer_id, epoch))

    def _readdressed(self, frame: bytes) -> bytes:
        host = self._host.encode()
        for port, mine in self.ports.items():
            frame = frame.replace(host + struct.pack(">i", port), host + struct.pack(">i", mine))
        return frame


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Read one frame, without its length."""
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)
