"""The offset map: a log with gaps, the watermark, and what a restart does with the metadata of the commit."""

from __future__ import annotations

from pictures.canvas import Canvas

#: What stands at the offsets from 100 on: done, in a handler, parked, a marker of a transaction, or waiting.
_LOG = "dddpddmddwdd.."
_ROLES = {"d": "done", "p": "wait", "w": "work", "m": "hint", ".": "plain"}
_NAMES = {"d": "done", "p": "parked", "w": "running", "m": "marker", ".": "new"}


def offset_map() -> str:
    """Return the picture."""
    canvas = Canvas(960, 430, "A commit: the lowest offset that is not done, and a map of done offsets above it")
    canvas.text(40, 36, "orders:0, before a crash", kind="h")
    _row(canvas, 70, _LOG)
    watermark = 40 + 3 * 63
    canvas.arrow((watermark + 28, 176), (watermark + 28, 134), role="wait")
    canvas.text(watermark - 66, 192, "watermark 103: committed", kind="t", role="wait")
    canvas.line((40 + 4 * 63, 142), (40 + 4 * 63, 150), (40 + 12 * 63 - 7, 150), (40 + 12 * 63 - 7, 142), role="done")
    canvas.text(500, 170, "done above it: 104\u2013105, 107\u2013108, 110\u2013111", role="done")
    canvas.box(40, 214, 880, 62, role="hint")
    canvas.text(56, 238, "commit", kind="h")
    canvas.text(130, 238, "offset = 103", kind="m")
    what = "metadata = version, ranges or bitmap, checksum over group, topic, partition and offset"
    canvas.text(270, 238, what, kind="m")
    bound = "4,095 characters at most: near that, no message above begins until the watermark moves"
    canvas.text(130, 261, bound, kind="n")
    canvas.text(40, 312, "after a restart: only messages that were not done are handled", kind="h")
    _row(canvas, 330, "xxxaxxmxxaxxaa")
    ignored = "A map that is foreign, cut or of another offset is ignored: then all from 103 on is handled again."
    canvas.text(40, 412, ignored, kind="n")
    return canvas.svg()


def _row(canvas: Canvas, y: float, log: str) -> None:
    roles = {**_ROLES, "x": "hint", "a": "work"}
    names = {**_NAMES, "x": "left out", "a": "handled"}
    for place, kind in enumerate(log):
        x = 40 + place * 63
        canvas.box(x, y, 56, 40, str(100 + place), role=roles[kind])
        canvas.text(x + 28, y + 56, names[kind], kind="n", anchor="middle")
