"""The codec of the offset map: which offsets above a commit point are done, stored in Kafka's commit metadata.

Format, version 2, all characters ASCII::

    "p2" kind base85(body)      kind: r run lengths, b bitmap; upper case when the body is deflated
    body = crc32(owner, committed offset, kind, content) 4 bytes big-endian, content
    owner = group, topic and partition, see `owner_of`

Run lengths are LEB128 numbers that alternate *not done*, *done* from the committed offset on; the last run is done.
The bitmap holds a bit for each offset from the committed one on, lowest bit first. The checksum ties a map to its
group, topic, partition and offset, because some tools copy commits with their metadata. The smallest form wins; run
lengths are tried only if runs are few. By default Kafka 4.3 accepts 4,095 characters and refuses 4,096. A longer map is
cut at its end, which costs a replay and never a loss.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

#: Most characters of commit metadata with the default `offset.metadata.max.bytes` of 4,096, which 4.3 itself refuses.
MAX_METADATA_CHARS = 4095

_PREFIX = "p2"
_CHECKSUM_BYTES = 4
_OFFSET_BYTES = 8
#: Most bytes of a body: five characters of base 85 carry four bytes.
_MAX_BODY_BYTES = (MAX_METADATA_CHARS - len(_PREFIX) - 1) // 5 * 4
#: Most bytes of an inflated body: a forged one must not fill the memory.
_MAX_INFLATED_BYTES = 1 << 20
#: Most runs that are encoded: each takes at least a byte, and deflate seldom saves more than a factor of eight.
_MAX_RUNS = 8 * _MAX_BODY_BYTES
#: A map with more runs is neither read nor written: a forged kilobyte could claim millions.
_MAX_READ_RUNS = 1 << 17
_MAX_OFFSET = (1 << 63) - 1
#: Bits of a run length: seven to a byte, and an offset has 63.
_MAX_SHIFT = 63

_START = attrgetter("start")
_RUN_OF_DONE = re.compile(rb"\x01+")
#: Bytes 0 and 1 as binary digits.
_DIGITS = bytes.maketrans(b"\x00\x01", b"01")


@dataclass(frozen=True, slots=True)
class OffsetMap:
    """The offsets that are done above a commit point."""

    #: The committed offset, which is not done.
    base: int
    #: Ranges of done offsets above `base`, rising, with gaps between them.
    done: tuple[range, ...]

    @property
    def end(self) -> int:
        """One past the highest done offset; `base` if the map is empty."""
        return self.done[-1].stop if self.done else self.base

    def __contains__(self, offset: int) -> bool:
        place = bisect_right(self.done, offset, key=_START) - 1
        return place >= 0 and offset < self.done[place].stop


def owner_of(group: str, topic: str, partition: int) -> bytes:
    """Return the identity of a map, by group and partition. A map of another owner is not accepted."""
    return f"{group}\0{topic}\0{partition}".encode()


def encode(base: int, done: Sequence[range], max_chars: int = MAX_METADATA_CHARS, owner: bytes = b"") -> str:
    """Encode a map: ranges that are done above `base`, rising and not empty. Ranges that touch are joined.

    The highest ranges are left out if the map exceeds `max_chars` characters. Returns an empty text if nothing is done.
    """
    kept = joined(done)[:_MAX_RUNS]
    while kept:
        text = _smallest(base, kept, owner)
        if len(text) <= max_chars:
            return text
        # Shorten in proportion, and by one range at least, so that this ends.
        kept = kept[: min(len(kept) - 1, len(kept) * max_chars // len(text))]
    return ""


def encode_flags(base: int, flags: bytes | bytearray, max_chars: int = MAX_METADATA_CHARS, owner: bytes = b"") -> str:
    """Encode a map as `encode` does, from a byte for each offset from `base` on: 1 is done.

    With many runs this takes a few passes in C, however many there are. A busy partition does it every second.
    """
    flags = flags.rstrip(b"\x00")
    runs = flags.count(b"\x00\x01")
    if runs and 2 * runs >= len(flags) // 8 and len(flags) // 8 < _MAX_INFLATED_BYTES and runs < _MAX_READ_RUNS:
        # Run lengths take at least two bytes a run: the bitmap is smaller.
        digits = flags[::-1].translate(_DIGITS)
        bitmap = int(digits, 2).to_bytes((len(flags) + 7) // 8, "little")
        text = _written(base, [("b", bitmap)], owner)
        if len(text) <= max_chars:
            return text
    runs_of_done = [range(base + run.start(), base + run.end()) for run in _RUN_OF_DONE.finditer(flags)]
    return encode(base, runs_of_done, max_chars, owner)


def joined(runs: Iterable[range]) -> list[range]:
    """Return ranges, none of them empty, sorted and with those that touch joined."""
    found: list[range] = []
    for run in sorted(runs, key=lambda run: run.start):
        if found and run.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, run.stop))
        else:
            found.append(run)
    return found


def _smallest(base: int, done: Sequence[range], owner: bytes) -> str:
    forms = [("r", _run_lengths(base, done))]
    if (done[-1].stop - base) // 8 < _MAX_INFLATED_BYTES:
        forms.append(("b", _bitmap(base, done)))
    return _written(base, forms, owner)


def _written(base: int, forms: list[tuple[str, bytes]], owner: bytes) -> str:
    """Return the smallest form, deflated or not, as text."""
    forms += [(kind.upper(), zlib.compress(content, 9)) for kind, content in forms]
    kind, content = min(forms, key=lambda form: len(form[1]))
    body = _checksum(owner, base, kind, content) + content
    return f"{_PREFIX}{kind}{base64.b85encode(body).decode('ascii')}"


def decode(base: int, metadata: str | None, owner: bytes = b"") -> OffsetMap | None:  # noqa: PLR0911 - one for each way to be wrong
    """Decode a map that was committed with `base`; None if there is none or it cannot be trusted.

    The metadata may be foreign, newer, cut, forged, or of another offset, partition or group. The work above `base` is
    then repeated, never skipped.
    """
    if not metadata or not metadata.startswith(_PREFIX) or len(metadata) <= len(_PREFIX):
        return None
    if len(metadata) > MAX_METADATA_CHARS:
        return None
    kind = metadata[len(_PREFIX)]
    try:
        body = base64.b85decode(metadata[len(_PREFIX) + 1 :])
        # The last group may be short. Several texts decode to the same bytes; only one of them is accepted.
        if base64.b85encode(body).decode() != metadata[len(_PREFIX) + 1 :]:
            return None
        checksum, content = body[:_CHECKSUM_BYTES], body[_CHECKSUM_BYTES:]
        if len(checksum) < _CHECKSUM_BYTES or checksum != _checksum(owner, base, kind, content):
            return None
        if kind.isupper():
            inflater = zlib.decompressobj()
            content = inflater.decompress(content, _MAX_INFLATED_BYTES)
            if not inflater.eof or inflater.unused_data:
                return None
        reader = {"r": _read_run_lengths, "b": _read_bitmap}[kind.lower()]
        done = tuple(islice(reader(base, content), _MAX_READ_RUNS + 1))
    except (ValueError, KeyError, zlib.error, binascii.Error):
        return None
    return OffsetMap(base, done) if 0 < len(done) <= _MAX_READ_RUNS else None


def _checksum(owner: bytes, base: int, kind: str, content: bytes) -> bytes:
    crc = 0
    for part in (owner, base.to_bytes(_OFFSET_BYTES, "big", signed=True), kind.encode(), content):
        crc = zlib.crc32(part, crc)
    return crc.to_bytes(_CHECKSUM_BYTES, "big")


def _run_lengths(base: int, done: Iterable[range]) -> bytes:
    out = bytearray()
    at = base
    for run in done:
        for length in (run.start - at, len(run)):
            rest = length
            while rest > 0x7F:  # noqa: PLR2004 - seven bits a byte, by LEB128
                out.append(rest & 0x7F | 0x80)
                rest >>= 7
            out.append(rest)
        at = run.stop
    return bytes(out)


def _read_run_lengths(base: int, content: bytes) -> Iterator[range]:
    lengths: list[int] = []
    value = shift = 0
    for byte in content:
        if shift >= _MAX_SHIFT:
            raise ValueError("a run length of more than 63 bits")
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit of LEB128
            lengths.append(value)
            value = shift = 0
    if shift or len(lengths) % 2:
        raise ValueError("the run lengths end in the middle")
    at = base
    for open_length, done_length in zip(lengths[::2], lengths[1::2], strict=True):
        at += open_length
        if not open_length or not done_length or at + done_length > _MAX_OFFSET:
            raise ValueError("a run is empty, or ends past the last offset there can be")
        yield range(at, at + done_length)
        at += done_length


def _bitmap(base: int, done: Iterable[range]) -> bytes:
    bits = 0
    for run in done:
        bits |= ((1 << len(run)) - 1) << (run.start - base)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _read_bitmap(base: int, content: bytes) -> Iterator[range]:
    if content and content[0] & 1:
        raise ValueError("the committed offset is not done by definition")
    flags = bin(int.from_bytes(content, "little"))[:1:-1]
    at = flags.find("1")
    while at != -1:
        end = flags.find("0", at)
        stop = len(flags) if end == -1 else end
        yield range(base + at, base + stop)
        at = flags.find("1", stop)
