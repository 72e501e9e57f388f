"""The offset map: which offsets above a commit point are done, written into Kafka's commit metadata.

Format, version 2, all characters ASCII::

    "p2" kind base85(body)      kind: r run lengths, b bitmap; upper case when the body is deflated
    body = crc32(owner, committed offset, kind, content) 4 bytes big-endian, content
    owner = group, topic and partition, see `owner_of`

Run lengths are LEB128 numbers that alternate *not done*, *done* from the committed offset on; the last run is done.
The bitmap holds a bit for each offset from the committed one on, lowest bit first. The checksum ties a map to the
group, topic, partition and offset it was committed with, for there are tools that copy commits with their metadata.
The smallest form wins; run lengths are tried only where runs are few. By its defaults Kafka 4.3 takes 4,095 characters
and refuses 4,096; a longer map is cut at its end, which costs a replay and never a loss.
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

#: Characters of commit metadata that Kafka takes where nobody has set `offset.metadata.max.bytes` lower: it is 4,096,
#: and 4.3 refuses exactly that.
MAX_METADATA_CHARS = 4095

_PREFIX = "p2"
_CHECKSUM_BYTES = 4
_OFFSET_BYTES = 8
#: Bytes of body that fit: five characters of base 85 carry four bytes.
_MAX_BODY_BYTES = (MAX_METADATA_CHARS - len(_PREFIX) - 1) // 5 * 4
#: A deflated body may not claim more than this: a forged one must not fill the memory.
_MAX_INFLATED_BYTES = 1 << 20
#: Runs worth looking at: each takes a byte at least, and deflate seldom wins more than eightfold.
_MAX_RUNS = 8 * _MAX_BODY_BYTES
#: A map with more runs is not read, and not written: a forged one of a kilobyte could claim millions.
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
    """What is done above a commit point."""

    #: The committed offset; it is itself not done.
    base: int
    #: Ranges of done offsets, rising, apart from each other and above `base`.
    done: tuple[range, ...]

    @property
    def end(self) -> int:
        """One past the highest offset the map calls done; `base` when it is empty."""
        return self.done[-1].stop if self.done else self.base

    def __contains__(self, offset: int) -> bool:
        place = bisect_right(self.done, offset, key=_START) - 1
        return place >= 0 and offset < self.done[place].stop


def owner_of(group: str, topic: str, partition: int) -> bytes:
    """Return what a map of this group and partition is tied to, so that no other is taken for it."""
    return f"{group}\0{topic}\0{partition}".encode()


def encode(base: int, done: Sequence[range], max_chars: int = MAX_METADATA_CHARS, owner: bytes = b"") -> str:
    """Write a map down: ranges done above `base`, rising and none empty; those that touch are joined.

    Ranges that do not fit into `max_chars` characters are left out from the top. Empty when nothing is done.
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
    """Write a map down as `encode` does, given a byte for each offset from `base` on: 1 where it is done.

    Where runs are many this costs a few passes in C, whatever their number; a busy partition does it every second.
    """
    flags = flags.rstrip(b"\x00")
    runs = flags.count(b"\x00\x01")
    if runs and 2 * runs >= len(flags) // 8 and len(flags) // 8 < _MAX_INFLATED_BYTES and runs < _MAX_READ_RUNS:
        # Two bytes a run at least: the bitmap is smaller.
        digits = flags[::-1].translate(_DIGITS)
        bitmap = int(digits, 2).to_bytes((len(flags) + 7) // 8, "little")
        text = _written(base, [("b", bitmap)], owner)
        if len(text) <= max_chars:
            return text
    runs_of_done = [range(base + run.start(), base + run.end()) for run in _RUN_OF_DONE.finditer(flags)]
    return encode(base, runs_of_done, max_chars, owner)


def joined(runs: Iterable[range]) -> list[range]:
    """Return the offsets of ranges, none of them empty, as ranges that rise and lie apart."""
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
    """Read a map that was committed with `base`; None when there is none or it cannot be trusted.

    It may be foreign, newer, cut, forged, or committed with another offset, for another partition or by another group.
    The work above `base` is then done again, never skipped.
    """
    if not metadata or not metadata.startswith(_PREFIX) or len(metadata) <= len(_PREFIX):
        return None
    if len(metadata) > MAX_METADATA_CHARS:
        return None
    kind = metadata[len(_PREFIX)]
    try:
        body = base64.b85decode(metadata[len(_PREFIX) + 1 :])
        # The last group may be short: several texts decode to it, and only one of them was written here.
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
