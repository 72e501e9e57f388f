"""Runs decoders of topic records on records that penstock did not write, in its own process.

Arguments: a seed, and examples for each decoder. Prints how many examples each decoder was given and refused, as JSON.
A decoder returns a value or raises `MessageFormatError`; anything else ends the process with an error that names the
decoder and its input. An example may take so many seconds of processor time, and the process so much memory: a count of
four thousand million in ten bytes must cost nothing. Refusals are kept in cycles and collected, as in a coordinator,
for errors keep the frames they came from. Needs nothing but penstock and the packages it needs itself, so that any
Python can run it. Offset maps, dead letters and retry topics have forged input among their own tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from penstock.errors import MessageFormatError
from penstock.message import FixedRecord
from penstock.spark_sink.sinks.kafka_ledger import decode_entry
from penstock.telemetry import propagation
from penstock.transactions.acked_producer import wire_headers
from penstock.transactions.operator.audit import _audited, _discarded
from penstock.transactions.stores.done_log import decode_ids, encode_ids
from penstock.transactions.stores.kafka.logs.recovered_partition import decode_claim
from penstock.transactions.wire.done_records import Note, Snapshot, StoredHalf, decode_done, encode_done
from penstock.transactions.wire.half import (
    CheckRequest,
    Half,
    decode_check_request,
    decode_discarded,
    decode_half,
    encode_check_request,
    encode_discarded,
    encode_half,
)
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict, decode_ops, encode_ops
from penstock.transactions.wire.topics import StoreTopics

#: Seconds of processor time for one example, and for one decoder.
EXAMPLE_S = 2.0
DECODER_S = 300.0
#: Bytes that the process may grow by.
GROWTH_BYTES = 1 << 29
#: Examples between two collections of what refusals left behind.
COLLECT = 200

Header = tuple[str, "bytes | None"]
Triple = tuple["bytes | None", "bytes | None", "list[Header]"]
TOPIC = "orders"
EDGES = (0, 1, 2, 3, 4, 5, 77, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1)
NUMBERS = (b"", b"0", b"-1", b"1/0", b"1e9", b"9" * 19, b"9" * 5_000, b"\xb2", "٣".encode(), b"1 ", b"\x00")


class Decoder(NamedTuple):
    """A decoder, and how to make an example for it."""

    decode: Callable[[Any], object]
    example: Callable[[random.Random], object]


def numbers(chance: random.Random, data: bytearray) -> None:
    """Overwrite a place with a number of some size that tends to hurt."""
    form = chance.choice((">B", ">H", ">I", ">Q", "<I"))
    size = struct.calcsize(form)
    if len(data) >= size:
        at = chance.randrange(len(data) - size + 1)
        struct.pack_into(form, data, at, chance.choice(EDGES) & ((1 << 8 * size) - 1))


def flips(chance: random.Random, data: bytearray) -> None:
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(chance: random.Random, data: bytearray) -> None:
    del data[chance.randrange(len(data) + 1) :]


def lengthened(chance: random.Random, data: bytearray) -> None:
    data += chance.choice((b"\x00", chance.randbytes(chance.randrange(64)), bytes(data)))


def hole(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.choice((1, 2, 4, 8, 28))]


def doubled(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = data[at : at + chance.choice((1, 4, 28, 46))]


MUTATIONS = (numbers, numbers, flips, flips, cut, lengthened, hole, doubled)


def changed(chance: random.Random, corpus: Sequence[bytes]) -> bytes | None:
    """Return random bytes, or a valid record that was changed."""
    kind = chance.random()
    if kind < 0.02:
        return None
    if kind < 0.1:
        return chance.randbytes(chance.randrange(200))
    data = bytearray(chance.choice(corpus))
    if kind < 0.2:
        other = chance.choice(corpus)
        data[chance.randrange(len(data) + 1) :] = other[chance.randrange(len(other) + 1) :]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        chance.choice(MUTATIONS)(chance, data)
    return bytes(data)


def of_bytes(decode: Callable[[Any], object], corpus: Sequence[bytes]) -> Decoder:
    return Decoder(decode, lambda chance: changed(chance, corpus))


def headers_changed(chance: random.Random, headers: list[Header], names: Sequence[str]) -> list[Header]:
    """Change a list of headers: names, contents, order and number."""
    made = list(headers)
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(made)) if made else 0
        name, content = made[at] if made else ("", None)
        kind = chance.randrange(7)
        if kind == 0:
            content = changed(chance, [content or b"x"])
        elif kind == 1:
            content = chance.choice(NUMBERS)
        elif kind == 2:
            name = chance.choice((*names, name + "x", "penstock-", "", "\U0001f600", "a\nb"))
        elif kind == 3:
            made.insert(at, chance.choice(headers or [("h", b"v")]))
            continue
        elif kind == 4:
            made = made[:at] + made[at + 1 :]
            continue
        elif kind == 5:
            chance.shuffle(made)
            continue
        else:
            content = chance.choice((None, b"", bytes(chance.randrange(70_000))))
        made[at : at + 1] = [(name, content)]
    return made


def of_headers(decode: Callable[[Triple], object], corpus: Sequence[Triple]) -> Decoder:
    names = sorted({name for _, _, headers in corpus for name, _ in headers})

    def example(chance: random.Random) -> Triple:
        key, value, headers = chance.choice(corpus)
        return chance.choice((key, None)), chance.choice((value, None)), headers_changed(chance, headers, names)

    return Decoder(decode, example)


def record(triple: Triple, topic: str = TOPIC) -> FixedRecord:
    return FixedRecord(topic, 0, 7, triple[0], triple[1], tuple(triple[2]), 1_700_000_000_000)


def half(**fields: Any) -> Half:
    own: tuple[Header, ...] = (("h", b"v"), ("h", None), ("", b""))
    return Half(new_id(), "orders", TOPIC, None, b"key", b"value", own, None)._replace(**fields)


def halves() -> list[Half]:
    return [
        half(),
        half(headers=()),
        half(partition=3, immunity_ms=1_000, order_key=b"42", resumed="penstock.discarded[0]@7"),
        half(part=(1, 2), deliver_at_ms=1_900_000_000_000, order_key=b""),
    ]


def op_records() -> list[bytes]:
    plain = [Op(new_id(), Verdict.COMMIT, Author.PRODUCER, "orders", 1, (at,), 0) for at in range(20)]
    named = [Op(new_id(), v, Author.OPERATOR, "orders", 1, (1, 2, 3), 2, "somebody") for v in Verdict]
    return [encode_ops(plain), encode_ops(plain[:1]), encode_ops(named), encode_ops([*plain, *named])]


def done_records() -> list[bytes]:
    notes = [Note(new_id(), at, v, 1, 2, at, 0) for at in range(9) for v in list(Verdict)[:4]]
    snapshots = [
        Snapshot(Note(one.transaction_id, 9, Verdict.UNKNOWN, 1, 2, 3, 4), (StoredHalf(8, 1_700_000_000_000, one),))
        for one in (half(), half(headers=(), key=None))
    ]
    several = half(part=(1, 2))
    whole = Snapshot(
        Note(several.transaction_id, 9, Verdict.COMMIT, 0, 0, 3, 4),
        (StoredHalf(8, 5, several), StoredHalf(9, 5, several._replace(part=(2, 2)))),
    )
    return [encode_done(notes), encode_done(notes[:1], snapshots), encode_done((), [whole])]


JSONS = [
    b'{"next_offset": 12, "batch": "abc"}',
    b'{"who": "me", "what": "resume", "transaction": "x", "group": "g", "place": "t[0]@1", "why": "so"}',
    b'{"next_offset": Infinity}',
    b'{"next_offset": NaN}',
    b'{"next_offset": 1e999}',
    b'{"next_offset": "9", "batch": "\\ud800"}',
    b'{"next_offset": [1], "batch": {}}',
    b"[" * 100_000,
    b'{"next_offset": ' + b"9" * 5_000 + b"}",
    b"null",
    b'"text"',
    b"7",
    b"\xff\xfe{\x00}\x00",
]


def decoders() -> dict[str, Decoder]:
    plain = halves()
    requests = [(one.key, one.value, encode_check_request(CheckRequest(one, 1, 7, 3))) for one in plain]
    discarded = [(one.key, one.value, encode_discarded(one, "checks exhausted", 15)) for one in plain]
    traced: list[Triple] = [
        (None, None, [("traceparent", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01"), ("tracestate", b"a=b,c=d")])
    ]
    topics = StoreTopics("penstock", 2)
    return {
        "half": of_headers(lambda one: decode_half(*one), [(one.key, one.value, encode_half(one)) for one in plain]),
        "check request": of_headers(lambda one: decode_check_request(*one), requests),
        "discarded": of_headers(lambda one: decode_discarded(*one), discarded),
        "discarded, as listed": of_headers(lambda one: _discarded(cast("Any", record(one))), discarded),
        "op": of_bytes(decode_ops, op_records()),
        "done": of_bytes(decode_done, done_records()),
        "ids of a done log": of_bytes(decode_ids, [encode_ids([new_id() for _ in range(5)]), encode_ids([])]),
        "claim": of_bytes(
            lambda one: decode_claim(topics, None if one is None else one.decode("latin-1")),
            [b"penstock.coordinators.x.a penstock.coordinators.x.b"],
        ),
        "trace context": of_headers(lambda one: propagation.extract(one[2]), traced),
        "audit": of_bytes(lambda one: _audited(cast("Any", record((None, one, [])))), JSONS),
        "Spark ledger": of_bytes(decode_entry, JSONS),
        "headers": of_headers(lambda one: wire_headers(cast("Any", record(one))), discarded),
    }


def refused(decode: Callable[[Any], object], example: object) -> bool:
    """Decode, and return whether it was refused. The error ends in a cycle with this frame, as a coordinator's does."""
    kept: object = None
    try:
        decode(example)
    except MessageFormatError as error:
        kept = error
    return kept is not None


def run(name: str, decoder: Decoder, seed: int, examples: int) -> dict[str, int]:
    chance = random.Random(f"{seed} {name}")  # noqa: S311 - the same examples for the same seed
    count = 0
    # The stack names a decoder that never returns.
    faulthandler.dump_traceback_later(DECODER_S, exit=True)
    for number in range(examples):
        example = decoder.example(chance)
        begun = time.process_time()
        try:
            count += refused(decoder.decode, example)
        except BaseException as error:
            raise AssertionError(f"{name}, example {number} of seed {seed}: {example!r:.2000}") from error
        took_s = time.process_time() - begun
        if took_s > EXAMPLE_S:
            raise AssertionError(f"{name}, example {number} of seed {seed} took {took_s:.1f} s: {example!r:.2000}")
        if number % COLLECT == 0:
            gc.collect()
    gc.collect()
    faulthandler.cancel_dump_traceback_later()
    return {"examples": examples, "refused": count}


def bound_memory() -> None:
    """Let what asks for too much fail with a MemoryError."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:  # noqa: PTH123 - no file of ours
        held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + GROWTH_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    seed, examples = int(sys.argv[1]), int(sys.argv[2])
    faulthandler.enable()
    # Some decoders log refused records; the log is not read here.
    logging.disable(logging.CRITICAL)
    made = decoders()
    bound_memory()
    print(json.dumps({name: run(name, decoder, seed, examples) for name, decoder in made.items()}))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main()
